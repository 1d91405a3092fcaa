// Which row of the step a token belongs to, and where in its sequence it stands.

#pragma once

// Rows of query length 1 come first, so the row of such a token is its own number; others are searched for.
__device__ __forceinline__ int row_of_token(int token, const int* query_starts, int num_rows) {
    if (token < num_rows && query_starts[token + 1] == token + 1) return token;
    int low = 0, high = num_rows;  // the row is in [low, high)
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (query_starts[middle] <= token ? low : high) = middle;
    }
    return low;
}
