// Finds the row of the step that a token belongs to.

#pragma once

// Rows of one token come first, so such a token's row is the token's own number. Other rows are found by binary search.
__device__ __forceinline__ int row_of_token(int token, const int* query_starts, int num_rows) {
    if (token < num_rows && query_starts[token + 1] == token + 1) return token;
    int low = 0, high = num_rows;  // the row is in [low, high)
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (query_starts[middle] <= token ? low : high) = middle;
    }
    return low;
}
