// Quantised weights in the layout that products read.
//
//   part    [panel of 64 outputs][strip of 16 outputs], zeros fill the last panel; then, of a packing without groups,
//           a scale for each output, fp32 [panels × 64]
//   strip   [block] header and units, see weight_codes.h: one stream through memory, which a CPU's prefetchers follow
//   header  scales    binary16 [16]
//           minima    binary16 [16], for kHalfMinima; uint8 [16], for kZeroPoints
//           [group]   int8 [16]: multipliers of the scales, then of the minima if there are any; where a block has
//                     several groups. Of values of 2 bits both have 4 bits: the minima's are the high ones of a byte
//
// weight = scale × value - minimum, where a group's scale and minimum are those of its block × its multipliers. The
// minimum of a zero point is scale × zero point.

#pragma once

#include "linears/weight_codes.h"

namespace {

struct QuantizedLayout {
    i64 blocks, block_units, block_groups, units, header, minima, multipliers, block_bytes, strip_bytes;
    i64 multiplier_bytes;  // of a group of an output
    Packing packing;

    QuantizedLayout(const Linear& linear, const Packing& p) : packing(p) {
        units = padded_inputs(linear) / kUnit;
        blocks = p.group_size ? linear.inputs / p.block_size : 0;
        if (blocks) units = linear.inputs / kUnit;
        block_units = blocks ? p.block_size / kUnit : units;
        block_groups = blocks ? p.block_size / p.group_size : 1;
        minima = kStrip * i64(sizeof(Half));
        multipliers = minima + (p.minima == kHalfMinima ? kStrip * i64(sizeof(Half)) : p.minima == kZeroPoints ? kStrip : 0);
        multiplier_bytes = p.minima != kNoMinima && p.bits > 2 ? 2 : 1;
        header = multipliers + (block_groups > 1 ? block_groups * multiplier_bytes * kStrip : 0);
        if (!blocks) header = 0;
        block_bytes = header + block_units * unit_bytes(p.bits);
        strip_bytes = (units / block_units * block_bytes + 63) / 64 * 64;
    }

    i64 panel_bytes() const { return kPanel / kStrip * strip_bytes; }
    const std::uint8_t* unit_of(const std::uint8_t* strip, i64 unit) const {
        return strip + unit / block_units * block_bytes + header + unit % block_units * unit_bytes(packing.bits);
    }

    // The scales of a group, or its minima, from the block's header.
    Floats scales(const std::uint8_t* block, i64 group) const {
        return multiplied(load_halves(reinterpret_cast<const Half*>(block)), block + multipliers, group, 0);
    }
    Floats minima_of(const std::uint8_t* block, i64 group) const {
        if (packing.minima == kZeroPoints)
            return mul(scales(block, group), load_bytes(reinterpret_cast<const std::int8_t*>(block + minima)));
        return multiplied(load_halves(reinterpret_cast<const Half*>(block + minima)),
                          block + multipliers + (multiplier_bytes - 1) * block_groups * kStrip, group, 4);
    }

  private:
    Floats multiplied(Floats factor, const std::uint8_t* all, i64 group, int place) const {
        if (block_groups == 1) return factor;
        all += group * kStrip;
        if (packing.bits > 2) return mul(factor, load_bytes(reinterpret_cast<const std::int8_t*>(all)));
        alignas(16) std::int8_t low[kStrip];
        for (i64 n = 0; n < kStrip; ++n) low[n] = std::int8_t(all[n] >> place & 15);
        return mul(factor, load_bytes(low));
    }
};

// Where the fp32 scales of a part without groups lie.
inline const float* output_scales(const QuantizedLayout& layout, const void* packed, i64 panels) {
    return reinterpret_cast<const float*>(static_cast<const std::uint8_t*>(packed) + panels * layout.panel_bytes());
}

inline i64 part_panels(const Linear& linear, i64 part) {
    return linear.parts[part].end_panel - (part ? linear.parts[part - 1].end_panel : 0);
}

inline i64 quantized_part_bytes(const Linear& linear, i64 part) {
    const QuantizedLayout layout(linear, linear.parts[part].packing);
    const i64 scales = layout.blocks ? 0 : kPanel * i64(sizeof(float));
    return part_panels(linear, part) * (layout.panel_bytes() + scales);
}

// The numbers of a part's weights as Python has them. Rows are its outputs, or [gate | up].
struct QuantizedNumbers {
    const void* values;     // int8 [rows][inputs], or uint8 [rows][inputs / 2] with the even input in the low bits
    i64 in_pairs;
    const float* factors;   // scales, then minima if they are halves: [rows][blocks][1 or 2]; or [rows]
    const std::uint8_t* multipliers;  // int8 [rows][groups][1 or 2]; or zero points, [rows][groups]; or null
};

// 8 bytes, each one of 8 values of 4 bits.
inline std::uint64_t spread(std::uint64_t pairs) {
    pairs = (pairs | pairs << 16) & 0x0000ffff0000ffff;
    pairs = (pairs | pairs << 8) & 0x00ff00ff00ff00ff;
    return (pairs | pairs << 4) & 0x0f0f0f0f0f0f0f0f;
}

// The stored values of a row's unit; zeros fill up what is behind its inputs.
inline void read_values(const QuantizedNumbers& numbers, const Packing& packing, i64 inputs, i64 row, i64 unit,
                        std::uint8_t* values) {
    if (numbers.in_pairs) {
        const auto* pairs = static_cast<const std::uint8_t*>(numbers.values) + (row * inputs + unit * kUnit) / 2;
        for (i64 k = 0; k < kUnit; k += 8, pairs += 4) {
            std::uint32_t eight;
            std::memcpy(&eight, pairs, 4);
            const std::uint64_t bytes = spread(eight);
            std::memcpy(values + k, &bytes, 8);
        }
        return;
    }
    const int zero = packing.bits == 8 ? kWeightOffset : packing.minima == kNoMinima ? 1 << (packing.bits - 1) : 0;
    const i64 count = std::clamp<i64>(inputs - unit * kUnit, 0, kUnit);
    std::memset(values, zero, kUnit);
    const auto* own = static_cast<const std::int8_t*>(numbers.values) + row * inputs + unit * kUnit;
    for (i64 k = 0; k < count; ++k) values[k] = std::uint8_t(own[k] + zero);
}

inline void pack_header(const QuantizedLayout& layout, const QuantizedNumbers& numbers, i64 row, i64 block,
                        std::uint8_t* header, i64 lane) {
    const i64 kinds = 1 + (layout.packing.minima == kHalfMinima), at = row * layout.blocks + block;
    for (i64 n = 0; n < kinds; ++n)
        reinterpret_cast<Half*>(header)[n * kStrip + lane] = to_half(numbers.factors[at * kinds + n]);
    if (layout.packing.minima == kZeroPoints) header[layout.minima + lane] = numbers.multipliers[at];
    if (layout.block_groups == 1) return;
    for (i64 group = 0; group < layout.block_groups; ++group) {
        const std::uint8_t* own = numbers.multipliers + (at * layout.block_groups + group) * kinds;
        std::uint8_t* first = header + layout.multipliers + group * kStrip + lane;
        *first = own[0];
        if (kinds == 1) continue;
        if (layout.multiplier_bytes == 1) *first |= own[1] << 4;
        else first[layout.block_groups * kStrip] = own[1];
    }
}

inline void pack_quantized(Engine& engine, const Linear& linear, i64 part, const QuantizedNumbers& numbers) {
    const WeightPart& weights = linear.parts[part];
    const QuantizedLayout layout(linear, weights.packing);
    const i64 panels = part_panels(linear, part), first_panel = weights.end_panel - panels;
    const i64 first_row = first_panel * panel_width(linear), bits = weights.packing.bits;
    auto* packed = static_cast<std::uint8_t*>(const_cast<void*>(weights.packed));
    auto* scales = const_cast<float*>(output_scales(layout, packed, panels));
    engine.pool.run(panels, [&](i64 panel, int) {
        std::uint8_t* target = packed + panel * layout.panel_bytes();
        std::memset(target, 0, layout.panel_bytes());
        for (i64 column = 0; column < kPanel; ++column) {
            // Rows count from the part's first output on.
            const i64 own = weight_row(linear, first_panel + panel, column), row = own - (own < 0 ? 0 : first_row);
            const i64 lane = column % kStrip;
            if (layout.blocks == 0) scales[panel * kPanel + column] = row < 0 ? 0.0f : numbers.factors[row];
            if (row < 0) continue;
            std::uint8_t* strip = target + column / kStrip * layout.strip_bytes;
            for (i64 block = 0; block < layout.blocks; ++block)
                pack_header(layout, numbers, row, block, strip + block * layout.block_bytes, lane);
            for (i64 unit = 0; unit < layout.units; ++unit) {
                std::uint8_t values[kUnit];
                read_values(numbers, weights.packing, linear.inputs, row, unit, values);
                store_unit(bits, values, const_cast<std::uint8_t*>(layout.unit_of(strip, unit)), lane);
            }
        }
    });
}

// The weights of one output, for a linear that is not gated.
inline void read_quantized_row(const Linear& linear, i64 part, i64 output, float* out) {
    const WeightPart& weights = linear.parts[part];
    const Packing& packing = weights.packing;
    const QuantizedLayout layout(linear, packing);
    const i64 panels = part_panels(linear, part), lane = output % kStrip;
    output -= (weights.end_panel - panels) * kPanel;
    const auto* packed = static_cast<const std::uint8_t*>(weights.packed);
    const std::uint8_t* strip = packed + output / kStrip * layout.strip_bytes;
    const i64 group_inputs = layout.blocks ? packing.group_size : linear.inputs;
    const bool is_signed = packing.bits == 8 || packing.codebook == kIq4;
    const int zero = zero_of(packing);
    std::uint8_t values[kUnit];
    float scales[16], minima[16] = {};
    if (layout.blocks == 0) scales[lane] = output_scales(layout, packed, panels)[output];
    for (i64 k = 0; k < linear.inputs; ++k) {
        if (k % kUnit == 0) load_unit(packing, layout.unit_of(strip, k / kUnit), lane, values);
        if (layout.blocks && k % group_inputs == 0) {
            const std::uint8_t* header = strip + k / packing.block_size * layout.block_bytes;
            const i64 group = k % packing.block_size / packing.group_size;
            store(scales, layout.scales(header, group));
            if (packing.minima != kNoMinima) store(minima, layout.minima_of(header, group));
        }
        const int value = values[k % kUnit] - zero;
        out[k] = scales[lane] * float(is_signed ? std::int8_t(value) : value) - minima[lane];
    }
}

}  // namespace
