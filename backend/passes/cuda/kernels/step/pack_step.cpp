// Packs a step for the device in one call: checks it, and writes its rows, their padding, changed pages and further
// parts to page-locked memory. Host code; step/step_packing.py declares the structs and step/step_buffers.py the arrays.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using i32 = std::int32_t;
using i64 = std::int64_t;

constexpr i32 kFromEmbeddings = -2, kBeyondAllTokens = 1 << 30;  // the latter: start of a padding row without tokens
constexpr i64 kMaxParts = 16, kAlignment = 4;                    // in ints
constexpr i64 kAxes = 3;                                         // of rotary positions

struct Layout {
    i64 max_rows, max_tokens, max_pages, page_tokens, num_pages, vocab_size, num_groups, max_logits;
    i64 most_changes, capacity;
    // Places of the arrays in the block.
    i64 query_starts, context_lens, slots, decode_slots, logit_query_starts, logit_context_lens, logit_slots, logit_tokens,
        drawn_slots, adapters, logit_adapters, ids, tiles;
    i64 adapted_tokens;  // size of adapters; 0 for a pass without them, whose logit_adapters are not there either
    i64 has_axes;        // positions follow the ids
};

struct Step {
    const i32 *input_ids, *query_starts, *context_lens, *page_table, *slots, *logit_rows, *own_tiles,
        *adapters,  // by row; null if no row has one
        *drafts,    // by logit row; null if there are none
        *positions; // [T, 3]; null if they are those in the sequences
    i32* block;  // page-locked
    i32* pages;  // [groups, max_rows, max_pages] on the device
    i64 num_tokens, num_rows, num_starts, num_logits, table_width;
    i64 padded_tokens;                            // at least num_tokens; rows of one token each, unless is_mixed
    i64 is_mixed, num_decode, num_own_tiles, num_tiles;  // of a captured mixed step
    i64 has_embeddings, is_drawn;
    i64 num_parts;
    const i32* parts[kMaxParts];
    i64 part_sizes[kMaxParts];
    // Results.
    i64 part_starts[kMaxParts];
    i64 changes_start, num_changes;  // changes beyond most_changes are only in pages
    i64 num_ints;
};

enum Fault : i64 { kNone, kTooMany, kStarts, kSlots, kTokens, kEmbeddings, kLogitRows, kDrafts, kEnds, kPages, kCapacity };

i64 aligned(i64 num_ints) { return (num_ints + kAlignment - 1) / kAlignment * kAlignment; }

Fault check(const Layout& layout, const Step& step) {
    if (step.num_tokens > layout.max_tokens || step.num_rows > layout.max_rows) return kTooMany;
    const i32* starts = step.query_starts;
    if (step.num_rows < 1 || step.num_starts != step.num_rows + 1 || starts[0] != 0) return kStarts;
    for (i64 r = 0; r < step.num_rows; ++r)
        if (starts[r + 1] <= starts[r]) return kStarts;
    if (starts[step.num_rows] != step.num_tokens) return kStarts;
    for (i64 r = 0; r < step.num_rows; ++r)
        if (step.slots[r] < 0 || step.slots[r] >= layout.max_rows) return kSlots;
    bool is_embedded = false;
    for (i64 i = 0; i < step.num_tokens; ++i) {
        if (step.input_ids[i] < kFromEmbeddings || step.input_ids[i] >= layout.vocab_size) return kTokens;
        is_embedded |= step.input_ids[i] == kFromEmbeddings;
    }
    if (is_embedded && !step.has_embeddings) return kEmbeddings;
    for (i64 i = 0; i < step.num_logits; ++i)
        if (step.logit_rows[i] < 0 || step.logit_rows[i] >= step.num_rows) return kLogitRows;
    i64 num_sampled = step.num_logits;
    for (i64 i = 0; step.drafts && i < step.num_logits; ++i) {
        const i64 row = step.logit_rows[i], count = step.drafts[i];
        if (count < 0 || count >= starts[row + 1] - starts[row]) return kDrafts;
        for (i64 k = 1; k <= count; ++k)
            if (step.input_ids[starts[row + 1] - k] < 0) return kDrafts;
        num_sampled += count;
    }
    if (num_sampled > layout.max_logits) return kDrafts;
    const i64 capacity = std::min(step.table_width, layout.max_pages) * layout.page_tokens;
    for (i64 r = 0; r < step.num_rows; ++r)
        if (step.context_lens[r] < 0 || i64(step.context_lens[r]) + starts[r + 1] - starts[r] > capacity) return kEnds;
    return kNone;
}

// Lists (slot counted through the tables of all groups, index, page) where the step's pages differ from the device's.
Fault list_changes(const Layout& layout, const Step& step, std::vector<i32>& changes) {
    for (i64 r = 0; r < step.num_rows; ++r) {
        const i64 end = i64(step.context_lens[r]) + step.query_starts[r + 1] - step.query_starts[r];
        const i64 count = (end + layout.page_tokens - 1) / layout.page_tokens;
        for (i64 g = 0; g < layout.num_groups; ++g) {
            const i64 row = g * layout.max_rows + step.slots[r];
            const i32 *needed = step.page_table + r * step.table_width * layout.num_groups + g,
                      *known = step.pages + row * layout.max_pages;
            for (i64 p = 0; p < count; ++p) {
                const i32 page = needed[p * layout.num_groups];
                if (page == known[p]) continue;
                if (page < 0 || page >= layout.num_pages) return kPages;
                changes.insert(changes.end(), {i32(row), i32(p), page});
            }
        }
    }
    return kNone;
}

// The last tokens of logit rows, then those before drafts, then padding.
void write_logits(const Layout& layout, const Step& step) {
    i32* block = step.block;
    i64 n = 0;
    const auto put = [&](i64 row, i64 token) {
        block[layout.logit_context_lens + n] = row < 0 ? 0 : i32(step.context_lens[row] + token - step.query_starts[row]);
        block[layout.logit_slots + n] = row < 0 ? -1 : step.slots[row];
        block[layout.logit_tokens + n] = i32(token);
        if (layout.adapted_tokens)
            block[layout.logit_adapters + n] = row < 0 || !step.adapters ? -1 : step.adapters[row];
        ++n;
    };
    for (i64 i = 0; i < step.num_logits; ++i) put(step.logit_rows[i], step.query_starts[step.logit_rows[i] + 1] - 1);
    for (i64 i = 0; step.drafts && i < step.num_logits; ++i)
        for (i64 k = step.drafts[i]; k > 0; --k)
            put(step.logit_rows[i], step.query_starts[step.logit_rows[i] + 1] - 1 - k);
    while (n < layout.max_logits) put(-1, n);
    for (i64 i = 0; i <= layout.max_logits; ++i) block[layout.logit_query_starts + i] = i32(i);
}

void write_positions(const Layout& layout, const Step& step) {
    i32* positions = step.block + layout.ids + step.padded_tokens;
    std::fill_n(positions, kAxes * step.padded_tokens, 0);
    if (step.positions) std::copy_n(step.positions, kAxes * step.num_tokens, positions);
    for (i64 r = 0; !step.positions && r < step.num_rows; ++r)
        for (i64 i = step.query_starts[r]; i < step.query_starts[r + 1]; ++i)
            std::fill_n(positions + kAxes * i, kAxes, step.context_lens[r] + i32(i) - step.query_starts[r]);
}

void write_rows(const Layout& layout, const Step& step) {
    i32* block = step.block;
    const i64 rows = step.num_rows;
    std::copy_n(step.input_ids, step.num_tokens, block + layout.ids);
    std::fill_n(block + layout.ids + step.num_tokens, step.padded_tokens - step.num_tokens, 0);
    std::copy_n(step.query_starts, rows + 1, block + layout.query_starts);
    for (i64 i = rows + 1; i < layout.max_rows + 2; ++i)
        block[layout.query_starts + i] = step.is_mixed ? kBeyondAllTokens : i32(step.num_tokens + i - rows);
    std::copy_n(step.context_lens, rows, block + layout.context_lens);
    std::fill_n(block + layout.context_lens + rows, layout.max_rows + 1 - rows, 0);
    std::copy_n(step.slots, rows, block + layout.slots);
    std::fill_n(block + layout.slots + rows, layout.max_rows + 1 - rows, -1);
    std::copy_n(step.slots, step.num_decode, block + layout.decode_slots);
    std::fill_n(block + layout.decode_slots + step.num_decode, layout.max_rows - step.num_decode, -1);
    for (i64 i = 0; i < layout.max_rows; ++i)
        block[layout.drawn_slots + i] = step.is_drawn && i < step.num_logits ? step.slots[step.logit_rows[i]] : -1;
    if (layout.adapted_tokens) {
        std::fill_n(block + layout.adapters, layout.adapted_tokens, -1);
        for (i64 r = 0; step.adapters && r < rows; ++r)
            std::fill(block + layout.adapters + step.query_starts[r], block + layout.adapters + step.query_starts[r + 1],
                      step.adapters[r]);
    }
    i32* tile = std::copy_n(step.own_tiles, 4 * step.num_own_tiles, block + layout.tiles);
    for (i64 i = step.num_own_tiles; i < step.num_tiles; ++i)
        for (const i32 value : {i32(layout.max_rows), 0, -1, 0}) *tile++ = value;  // an unused one, of the row of padding
}

}  // namespace

extern "C" {

int ps_abi() { return PS_ABI; }

// Returns a Fault, after which nothing has changed.
i64 ps_pack_step(const Layout* layout, Step* step) {
    if (const Fault fault = check(*layout, *step)) return fault;
    thread_local std::vector<i32> changes;
    changes.clear();
    if (const Fault fault = list_changes(*layout, *step, changes)) return fault;
    const i64 token_ints = (layout->has_axes ? 1 + kAxes : 1) * step->padded_tokens;
    const i64 used = step->is_mixed ? layout->tiles + 4 * step->num_tiles : layout->ids + token_ints;
    step->num_changes = i64(changes.size()) / 3;
    step->changes_start = aligned(used);
    i64 end = step->changes_start;
    if (step->num_changes <= layout->most_changes) end += aligned(i64(changes.size()));
    for (i64 i = 0; i < step->num_parts; ++i) {
        step->part_starts[i] = end;
        end += aligned(step->part_sizes[i]);
    }
    step->num_ints = end;
    if (end > layout->capacity) return kCapacity;
    write_rows(*layout, *step);
    write_logits(*layout, *step);
    if (layout->has_axes) write_positions(*layout, *step);
    if (step->num_changes <= layout->most_changes)
        std::copy(changes.begin(), changes.end(), step->block + step->changes_start);
    for (i64 i = 0; i < step->num_parts; ++i)
        if (step->part_sizes[i]) std::memcpy(step->block + step->part_starts[i], step->parts[i], 4 * step->part_sizes[i]);
    for (std::size_t i = 0; i < changes.size(); i += 3)
        step->pages[changes[i] * layout->max_pages + changes[i + 1]] = changes[i + 2];
    return kNone;
}

}  // extern "C"
