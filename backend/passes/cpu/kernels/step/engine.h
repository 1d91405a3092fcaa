// State shared by the operations: the model's shape, the current step, the threads and their scratch memory.

#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "step/thread_pool.h"
#include "vectors/vectors.h"

namespace {

constexpr int kMaxQueryRows = 24;     // queries × heads of a group that share one read of keys and values
constexpr int kMaxAmxQueryRows = 48;  // the same with AMX: a multiple of 16, the rows of its tiles
constexpr int kBlock = 64;            // key positions per softmax block, for any page size
constexpr int kPiece = 512;           // key positions per piece: has its own softmax, merged later; threads may divide pieces
constexpr int kMaxHeadDim = 1024;

// What a value of 4 bits stands for. As in native_structs.py.
enum Codebook : i64 { kIntegers = 0, kE2m1 = 1, kIq4 = 2 };

// What a group has beside its scale. As in native_structs.py.
enum Minima : i64 { kNoMinima = 0, kHalfMinima = 1, kZeroPoints = 2 };

// How the numbers of a weight are stored. See quantized_weights.h.
struct Packing {  // mirrored by native_structs.py
    i64 bits;        // of a value: 2 to 6, or 8; 0 for floats
    i64 codebook;
    i64 group_size;  // inputs that share a scale: 16, or a multiple of 32; 0 for all, with a scale in fp32
    i64 block_size;  // inputs that share binary16 numbers: one group or several
    i64 minima;
};

constexpr int kMaxWeightParts = 3;

// The weights of consecutive panels of outputs.
struct WeightPart {  // mirrored by native_structs.py
    const void* packed;
    i64 end_panel;
    Packing packing;
};

constexpr int kMaxAdapterParts = 4;

// Outputs of a linear that have matrices of their own: q, k, v, gate or up. See lora.h.
struct AdapterPart {  // mirrored by native_structs.py
    const void* up;
    i64 first_output;  // a multiple of 16, or the first of `up` in a gated pair
    i64 end_output;
    i64 first_rank;  // of the adapter's
    i64 num_ranks;
};

// An adapter's matrices for one linear; no parts if it leaves the linear alone.
struct Adapter {  // mirrored by native_structs.py
    const void* down;
    i64 num_ranks;  // of all parts; zeros fill the last up to a multiple of 4
    i64 num_parts;
    AdapterPart parts[kMaxAdapterParts];
};

struct Linear {  // mirrored by native_structs.py
    const float* bias;  // [outputs] or null; [gate | up] for a gated pair
    i64 inputs;
    i64 outputs;  // for a gated pair: of one of the two
    i64 gated;
    i64 scales_whole_rows;  // a row of activations has one scale, not one for each unit of inputs
    i64 num_parts;
    WeightPart parts[kMaxWeightParts];
    const Adapter* adapters;  // one for each adapter of the model, or null
    i64 most_ranks;  // of these
    float scale;     // of the results, bias included
};

struct Attention {  // mirrored by native_structs.py
    void* cache;
    const float* q_norm;  // of the shape's QkNormScope, or null, as k_norm
    const float* k_norm;
    const float* v_norm;  // ones, or null
    const float* sinks;  // [heads] or null: a score for each head that takes part in the softmax and has no value
    i64 window;       // tokens; 0 for none
    i64 first_key;    // the first position that tokens see
    i64 query_rope;  // where cosines and sines for q begin in a row of Step::rope; -1 for a layer without, as the next
    i64 key_rope;
    i64 group;  // whose pages its cache has
    i64 page_bytes;  // from one page of its cache to the next
    i64 has_other_heads;  // of Shape::other
    i64 stores;  // rows are [q | k | v], otherwise q: then it reads another layer's cache
    i64 sees_ahead;  // tokens see up to Step::ends
};

// See layer_inputs.h.
struct LayerInputs {  // mirrored by native_structs.py
    const void* table;  // as of run_embed, as the next
    i64 is_packed;
    const float* norm;  // [width]
    i64 width;
    i64 num_layers;
    i64 num_ids;  // rows of the table; tokens beyond have those of token 0
    float scale;  // of the table's rows
};

struct Experts {  // mirrored by native_structs.py
    Linear gate_up;  // of the first expert, as `down`: packed weights and biases of the others follow, all of a size
    Linear down;
    i64 gate_up_bytes;
    i64 down_bytes;
    i64 count;
    i64 per_token;
    i64 normalises;  // whether a token's weights are divided by their sum
    const float* factors;  // [count] or null: of the weights
};

enum CacheForm : i64 { kFloatCache = 0, kBf16Cache = 1, kQ8Cache = 2 };  // as in native_structs.py

enum NormKind : i64 { kRootMeanSquare = 0, kLayerNorm = 1 };                        // as in native_structs.py
enum QkNormScope : i64 { kSharedByHeads = 0, kEachHead = 1, kWholeProjection = 2 };  // as in native_structs.py

// The heads of keys and values.
struct KvHeads {  // mirrored by native_structs.py
    i64 num_kv_heads;
    i64 head_dim;
    i64 rotary_dim;
};

struct Shape : KvHeads {  // mirrored by native_structs.py
    KvHeads other;  // of layers with other heads; 0 if there are none
    i64 hidden;
    i64 num_heads;
    i64 num_gates;  // of attention's results: one for each head, or 0. They follow q in its rows
    i64 page_size;
    i64 act_bf16;
    i64 cache_form;
    i64 uses_tiles;  // for products of bf16; needs request_tiles()
    i64 rope_width;  // numbers in a row of Step::rope
    i64 norm_kind;
    i64 qk_norm_scope;
    float eps;
    float score_scale;
    float scores_softcap;  // 0 for none, as logits_softcap
    float logits_softcap;
    float embedding_scale;
    float gate_alpha;  // of clamped_mul, as gate_limit
    float gate_limit;
};

// Query tokens of one row that read its keys together: tokens [token, token + count) of the step, at positions
// [position, position + count). Their results go to output rows [out, out + count).
struct Tile {
    i64 row, token, count, position, out;
};

// One thread's unit of work: a tile for kv heads [head, last_head), over all its pieces. If `partial` is not negative:
// over `piece` only, and the result goes to Engine::partials, for a Merge. `partial` counts results of one head there.
struct WorkItem {
    Tile tile;
    i64 head, last_head;
    i64 piece, partial;
};

// Merges one kv head of a single token, the item_head-th of the num_heads of its work items: the pieces [0, num_pieces) of
// all these heads start at index `partial` of Engine::partials.
struct Merge {
    Tile tile;
    i64 head, item_head, num_heads;
    i64 num_pieces, partial;
};

struct Work {
    std::vector<WorkItem> items;
    std::vector<Merge> merges;
};

// One thread's unit of an encoder's attention: queries [first, last) of a row, for one head.
struct EncoderItem {
    i64 row, head, first, last;
};

struct Step {
    std::vector<std::int32_t> positions;
    std::vector<i64> slot_mapping;  // [groups][tokens]: page × page_size + offset
    Work work[2], last_work[2];  // for the usual heads, and for other ones
    std::vector<i64> last_tokens;  // the last tokens of the logit rows, those to verify, and the scored tokens
    i64 num_logits = 0;            // how many of them are not scored
    i64 num_narrowed = 0;          // how many of them the step consists of, if it is narrowed
    const std::int32_t* input_ids = nullptr;
    const float* rope = nullptr;  // [position, or token if has_turns][rope][cosines, sines]
    bool has_turns = false;
    const std::int32_t* page_tables = nullptr;  // [groups][rows][width]
    i64 page_table_width = 0;
    i64 num_rows = 0;
    i64 num_tokens = 0;
    bool is_narrowed = false;  // to last_tokens
    bool has_adapters = false;
    std::vector<std::int32_t> adapters;  // if so: of each token, -1 for none
    const std::int32_t* row_starts = nullptr;  // [rows + 1]
    const std::int32_t* contexts = nullptr;    // [rows]
    const std::int32_t* slots = nullptr;       // [rows]
    const std::int32_t* verified = nullptr;    // ascending tokens before drafts: the state after each is kept
    i64 num_verified = 0;
    const std::int32_t* ends = nullptr;  // of each token, the position behind the last that it sees; null for its own
    const std::int32_t* token_types = nullptr;  // of an encoder: of each token
    std::vector<EncoderItem> encoder_items;

    const std::int32_t* pages(i64 group, i64 row) const {
        return page_tables + (group * num_rows + row) * page_table_width;
    }
    i64 rows() const { return is_narrowed ? num_narrowed : num_tokens; }
    i64 token(i64 row) const { return is_narrowed ? last_tokens[row] : row; }
    std::int32_t adapter(i64 row) const { return adapters[token(row)]; }
};

struct alignas(64) CacheLine {
    std::int8_t bytes[64];
};

// Integers that rows of a linear with quantised weights consist of. See quantized_rows.h.
struct IntegerRows {
    std::vector<CacheLine> memory;
    std::vector<float> scales;           // [rows][inputs / 32]
    std::vector<std::int16_t> sixteens;  // [rows][inputs / 16][2]: negative sums, see store_negative_sums
    std::vector<std::int32_t> starts[kMaxWeightParts];  // [rows][groups]: where sums with a part of the weights begin
    i64 inputs = 0;                      // a multiple of 64; zeros fill the rows up to it

    const std::int8_t* row(i64 r) const { return memory.data()->bytes + r * inputs; }
    std::int8_t* row(i64 r) { return memory.data()->bytes + r * inputs; }
};

struct QuantizedRows {
    IntegerRows integers[2];  // values and remainders
    std::vector<std::uint64_t> wide;  // [rows][inputs / 2048]: a bit for each unit of 32 inputs that has remainders
    std::vector<float> negative[kMaxWeightParts];  // [rows][groups]: the negative sum of the numbers, for minima
};

// The rows of a step, once for each expert that they use, grouped by expert.
struct Routing {
    // Neighbours within a group that are multiplied together.
    struct Block {
        i64 expert, begin, end;
    };

    std::vector<std::int32_t> chosen;  // [rows][experts per token], the likeliest first
    std::vector<float> chosen_weights;
    std::vector<std::int32_t> rows;  // the row of each pair of row and expert, by expert, then by row
    std::vector<float> weights;      // of each pair
    std::vector<i64> ends;           // [experts]: where each group ends
    std::vector<Block> blocks;
    std::vector<CacheLine> inputs;  // [pairs][hidden]: x of each pair's row
    std::vector<CacheLine> gated;   // [pairs][width]: what the first product gives
};

struct EncoderPart;

struct Engine {
    ThreadPool pool;
    Shape shape;
    Step step;
    QuantizedRows quantized;
    Routing routing;
    std::vector<std::vector<float>> scratch;  // one per thread
    std::vector<float> partials;              // results of pieces, until they are merged
    std::vector<float> ranks;                 // [rows][ranks]: see lora.h
    std::vector<std::shared_ptr<EncoderPart>> parts;  // of an encoder's step; kept for later ones

    Engine(int num_threads, i64 spin_ns, const Shape& s) : pool(num_threads, spin_ns), shape(s), scratch(num_threads) {}

    bool has_other_heads = false;  // shape describes those now

    // Until it is called again, the shape has the heads of layers with, or without, other ones.
    void use_heads(bool others) {
        if (others != has_other_heads) std::swap(static_cast<KvHeads&>(shape), shape.other);
        has_other_heads = others;
    }

    i64 row_size(const Attention& layer) const {
        return (shape.num_heads + shape.num_gates + (layer.stores ? 2 * shape.num_kv_heads : 0)) * shape.head_dim;
    }

    i64 group() const { return shape.num_heads / shape.num_kv_heads; }
    i64 tile_rows() const { return std::max<i64>(shape.uses_tiles ? kMaxAmxQueryRows : kMaxQueryRows, group()); }

    bool in_place() const { return shape.page_size % 16 == 0; }

    // Positions that are contiguous in memory: the largest part of a block that never crosses the end of a page.
    i64 segment() const {
        if (!in_place()) return kBlock;
        return shape.page_size % 64 == 0 ? 64 : shape.page_size % 32 == 0 ? 32 : 16;
    }

    // Runs body(first, last, thread) over [0, count) in parallel, in chunks of about grain.
    template <class F> void split(i64 count, i64 grain, const F& body) {
        const i64 pieces = std::clamp<i64>(count / std::max<i64>(grain, 1), 1, i64(pool.num_threads()) * 4);
        pool.run(pieces, [&](i64 piece, int thread) { body(count * piece / pieces, count * (piece + 1) / pieces, thread); });
    }
};

}  // namespace
