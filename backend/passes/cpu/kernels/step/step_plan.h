// Cuts a step's rows into work items for the threads.

#pragma once

#include "attention/attention.h"

namespace {

// The limit of a single token's work item is a quarter of one thread's share of the step: all its kv heads if they fit,
// else one piece of all heads, else one head, else one piece of one head. A piece of all heads reads pages from start to
// end. Sorted by cost, cheapest first: the pool runs the last chunk first.
inline Work split_work(const Engine& engine, const std::vector<Tile>& tiles, i64& num_partials) {
    const i64 kv_heads = engine.shape.num_kv_heads;
    const auto cost_of_head = [](const Tile& tile) { return tile.count * (tile.position + tile.count); };
    i64 total = 0;
    for (const Tile& tile : tiles) total += cost_of_head(tile) * kv_heads;
    const i64 share = total / (4 * engine.pool.num_threads());
    Work work;
    num_partials = 0;
    for (const Tile& tile : tiles) {
        const i64 cost = cost_of_head(tile), num_pieces = tile.position / kPiece + 1;
        const bool sees_ahead = engine.step.ends && engine.step.ends[tile.token] > tile.position + 1;
        const bool is_cut = tile.count == 1 && num_pieces > 1 && engine.pool.num_threads() > 1 && !sees_ahead;
        if (tile.count == 1 && cost * kv_heads <= share) {
            work.items.push_back({tile, 0, kv_heads, 0, -1});
            continue;
        }
        const i64 num_heads = is_cut && kPiece * kv_heads <= share ? kv_heads : 1;
        for (i64 h = 0; h < kv_heads; h += num_heads) {
            if (!is_cut || (num_heads < kv_heads && cost <= share)) {
                work.items.push_back({tile, h, h + 1, 0, -1});
                continue;
            }
            for (i64 i = 0; i < num_heads; ++i)
                work.merges.push_back({tile, h + i, i, num_heads, num_pieces, num_partials});
            for (i64 piece = 0; piece < num_pieces; ++piece, num_partials += num_heads)
                work.items.push_back({tile, h, h + num_heads, piece, num_partials});
        }
    }
    const auto cost = [&](const WorkItem& item) {
        const i64 cost_of_one = item.partial < 0
                                    ? cost_of_head(item.tile)
                                    : std::min<i64>(kPiece, item.tile.position + 1 - item.piece * kPiece);
        return cost_of_one * (item.last_head - item.head);
    };
    const auto is_cheaper = [&](const WorkItem& a, const WorkItem& b) { return cost(a) < cost(b); };
    std::stable_sort(work.items.begin(), work.items.end(), is_cheaper);
    return work;
}

struct StepRows {  // mirrored by native_structs.py
    // Back to back, and read until the step ends: input ids [num_tokens], starts [num_rows + 1], contexts [num_rows],
    // slots [num_rows], page tables [num_groups][num_rows][table_width], logit rows [num_logit_rows], further tokens with logits
    // [num_verified], scored tokens [num_scored], adapters [num_rows] if a row has one, and ends [num_tokens] if a token
    // sees later ones.
    const std::int32_t* arrays;
    const float* rope;
    i64 num_tokens;
    i64 num_rows;
    i64 num_groups;  // of layers with pages of their own
    i64 table_width;
    i64 num_logit_rows;
    i64 num_verified;
    i64 num_scored;
    i64 has_adapters;
    i64 has_turns;  // rope has a row for each token, not for each position
    i64 has_ends;
};

// Adds ascending tokens to the last ones of the rows, and tiles of those that are consecutive tokens of a row.
inline void plan_tokens(const std::int32_t* starts, const std::int32_t* tokens, i64 num_tokens, i64 tile_tokens,
                        Step& step, std::vector<Tile>& tiles) {
    i64 row = 0;
    for (i64 i = 0, count; i < num_tokens; i += count) {
        while (starts[row + 1] <= tokens[i]) ++row;
        const i64 most = std::min({tile_tokens, num_tokens - i, i64(starts[row + 1] - tokens[i])});
        for (count = 1; count < most && tokens[i + count] == tokens[i] + count;) ++count;
        tiles.push_back({row, tokens[i], count, step.positions[tokens[i]], i64(step.last_tokens.size())});
        step.last_tokens.insert(step.last_tokens.end(), tokens + i, tokens + i + count);
    }
}

// rows: the adapter of each row.
inline void plan_adapters(const StepRows& given, const std::int32_t* starts, const std::int32_t* rows, Step& step) {
    step.has_adapters = given.has_adapters;
    if (!step.has_adapters) return;
    step.adapters.resize(given.num_tokens);
    for (i64 row = 0; row < given.num_rows; ++row)
        std::fill(step.adapters.begin() + starts[row], step.adapters.begin() + starts[row + 1], rows[row]);
}

// Fills the work of attention with the engine's heads, and the last tokens.
inline void plan_attention(Engine& engine, const StepRows& given, const std::int32_t* starts,
                           const std::int32_t* logit_rows) {
    Step& step = engine.step;
    const i64 tile_tokens = engine.tile_rows() / engine.group();
    step.last_tokens.clear();
    std::vector<Tile> tiles, last_tiles;
    for (i64 row = 0; row < given.num_rows; ++row)
        for (i64 token = starts[row]; token < starts[row + 1]; token += tile_tokens)
            tiles.push_back({row, token, std::min(tile_tokens, starts[row + 1] - token), step.positions[token], token});
    for (i64 i = 0; i < given.num_logit_rows; ++i) {
        const i64 row = logit_rows[i], token = starts[row + 1] - 1;
        step.last_tokens.push_back(token);
        last_tiles.push_back({row, token, 1, step.positions[token], i});
    }
    const std::int32_t* verified = logit_rows + given.num_logit_rows;
    plan_tokens(starts, verified, given.num_verified, tile_tokens, step, last_tiles);
    step.num_logits = i64(step.last_tokens.size());
    plan_tokens(starts, verified + given.num_verified, given.num_scored, tile_tokens, step, last_tiles);
    i64 num_partials = 0, num_last_partials = 0;
    step.work[engine.has_other_heads] = split_work(engine, tiles, num_partials);
    step.last_work[engine.has_other_heads] = split_work(engine, last_tiles, num_last_partials);
    const i64 floats = SoftmaxState::floats(engine.group(), engine.shape.head_dim);
    engine.partials.resize(std::max({i64(engine.partials.size()), num_partials * floats, num_last_partials * floats}));
}

inline void plan_step(Engine& engine, const StepRows& given) {
    const i64 num_rows = given.num_rows;
    const std::int32_t* starts = given.arrays + given.num_tokens;
    const std::int32_t* contexts = starts + num_rows + 1;
    Step& step = engine.step;
    step.row_starts = starts;
    step.contexts = contexts;
    step.slots = contexts + num_rows;
    step.page_tables = step.slots + num_rows;
    step.page_table_width = given.table_width;
    step.num_rows = num_rows;
    const std::int32_t* logit_rows = step.pages(given.num_groups, 0);
    const i64 size = engine.shape.page_size;
    step.input_ids = given.arrays;
    step.verified = logit_rows + given.num_logit_rows;
    step.num_verified = given.num_verified;
    step.rope = given.rope;
    step.has_turns = given.has_turns;
    step.num_tokens = given.num_tokens;
    step.is_narrowed = false;
    step.positions.resize(step.num_tokens);
    step.slot_mapping.resize(given.num_groups * step.num_tokens);
    for (i64 row = 0; row < num_rows; ++row) {
        const i64 length = starts[row + 1] - starts[row];
        for (i64 i = 0; i < length; ++i) {
            const i64 position = contexts[row] + i;
            step.positions[starts[row] + i] = std::int32_t(position);
            for (i64 group = 0; group < given.num_groups; ++group) {
                const i64 page = step.pages(group, row)[position / size];
                step.slot_mapping[group * step.num_tokens + starts[row] + i] = page * size + position % size;
            }
        }
    }
    const std::int32_t* rest = logit_rows + given.num_logit_rows + given.num_verified + given.num_scored;
    plan_adapters(given, starts, rest, step);
    step.ends = given.has_ends ? rest + given.has_adapters * num_rows : nullptr;
    for (const bool others : {true, false}) {
        engine.use_heads(others);
        if (engine.shape.num_kv_heads) plan_attention(engine, given, starts, logit_rows);
    }
}

}  // namespace
