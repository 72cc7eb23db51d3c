#include "eagle3.h"

#include <math.h>
#include <string.h>

enum { LANES = 64, BLOCK = 512 };

/* On x86 with glibc, GCC builds the hot functions for several vector widths and the loader takes the widest that the CPU
   has; elsewhere, and under AddressSanitizer, which cannot run before the loader's choice, the baseline is used. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#define WIDEST __attribute__((flatten, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDEST
#endif

/* exp(x) for x <= 0 within 2e-7 relative, in a form that compilers vectorise.  exp(x) = 2^n * 2^f with n the
   nearest integer to x*log2(e) and |f| <= 1/2; 2^f by its Taylor polynomial in f*ln(2). */
static inline float exp_nonpositive(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits */
    float shifted = x * 1.44269504f + shift;
    float n = shifted - shift;
    float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    float p = 1.0f + r * (1.0f + r * (0.5f + r * (1.0f / 6 + r * (1.0f / 24 + r * (1.0f / 120 + r / 720)))));
    union { float f; int32_t i; } scale;
    scale.i = ((int32_t)n + 127) * (1 << 23);
    return p * scale.f;
}

static float max_of(const float *z, size_t n) {
    float best[LANES];
    for (size_t l = 0; l < LANES; l++) best[l] = -INFINITY;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t l = 0; l < LANES; l++) best[l] = z[i + l] > best[l] ? z[i + l] : best[l];
    for (; i < n; i++) best[0] = z[i] > best[0] ? z[i] : best[0];
    for (size_t l = 1; l < LANES; l++) best[0] = best[l] > best[0] ? best[l] : best[0];
    return best[0];
}

static inline float exp_or_nothing(float x) { return x <= 0.0f ? exp_nonpositive(x) : 0.0f; }

/* log(sum(exp(scale * (z - max)))), ignoring NaN; `max` is the largest and finite. */
static float log_sum_exp(const float *z, size_t n, float max, float scale) {
    float sums[LANES] = {0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t l = 0; l < LANES; l++) sums[l] += exp_or_nothing(scale * (z[i + l] - max));
    double sum = 0.0;
    for (; i < n; i++) sum += exp_or_nothing(scale * (z[i] - max));
    for (size_t l = 0; l < LANES; l++) sum += sums[l];
    return (float)log(sum);
}

/* Insert position i into the descending list of `found` < or == k positions; returns the new length. */
static int32_t insert(const float *z, int32_t i, int32_t k, int32_t *best, int32_t found) {
    int32_t at = found < k ? found : k - 1;
    while (at > 0 && z[i] > z[best[at - 1]]) {
        best[at] = best[at - 1];
        at--;
    }
    best[at] = i;
    return found < k ? found + 1 : k;
}

/* Positions of the k largest, best first, ties by lower position; returns how many are above -infinity. */
static int32_t select_largest(const float *z, int32_t n, int32_t k, int32_t *best) {
    int32_t found = 0;
    float bar = -INFINITY; /* what a value must exceed to enter */
    for (int32_t start = 0; start < n; start += BLOCK) {
        int32_t end = start + BLOCK < n ? start + BLOCK : n;
        if (!(max_of(z + start, end - start) > bar)) continue;
        for (int32_t i = start; i < end; i++) {
            if (!(z[i] > bar)) continue;
            found = insert(z, i, k, best, found);
            if (found == k) bar = z[best[k - 1]];
        }
    }
    return found;
}

WIDEST void e3_topk(const float *logits, float scale, const int32_t *d2t, int32_t n, int32_t k, float *work, int32_t *ids,
                    float *logps) {
    const float *z = logits;
    if (d2t) {
        for (int32_t i = 0; i < n; i++) work[i] = logits[d2t[i]];
        z = work;
    }
    int32_t found = select_largest(z, n, k, ids);
    float max = found ? z[ids[0]] : 0.0f;
    float total = found ? log_sum_exp(z, n, max, scale) : 0.0f;
    for (int32_t i = 0; i < k; i++) {
        logps[i] = i < found ? scale * (z[ids[i]] - max) - total : -INFINITY;
        ids[i] = i >= found ? -1 : d2t ? d2t[ids[i]] : ids[i];
    }
}

WIDEST int32_t e3_argmax(const float *logits, int32_t n) {
    float best = -INFINITY;
    int32_t block = 0; /* start of the first block that holds the largest */
    for (int32_t start = 0; start < n; start += BLOCK) {
        float max = max_of(logits + start, start + BLOCK < n ? BLOCK : n - start);
        if (max > best) best = max, block = start;
    }
    if (!isfinite(best)) return -1;
    while (logits[block] != best) block++;
    return block;
}

void e3_gather(const float *rows, const int32_t *index, int32_t n, size_t width, float *out) {
    for (int32_t i = 0; i < n; i++) memcpy(out + (size_t)i * width, rows + (size_t)index[i] * width, width * sizeof *out);
}

/* How many tokens before `end` agree with those at the end of the text, up to `most`. */
static int32_t agreeing(const int32_t *text, int32_t n, int32_t end, int32_t most) {
    int32_t length = 0;
    while (length < most && length < end && text[end - 1 - length] == text[n - 1 - length]) length++;
    return length;
}

int32_t e3_matches(const int32_t *text, int32_t n, int32_t shortest, int32_t longest, int32_t checked, e3_match *out) {
    int32_t found = 0;
    for (int32_t end = n - 1; end >= shortest && checked > 0; end--) {
        if (text[end - 1] != text[n - 1]) continue;
        int32_t length = agreeing(text, n, end, longest), at = 0;
        if (length < shortest) continue;
        checked--;
        while (at < found && text[out[at].end] != text[end]) at++;
        if (at == found) out[found++] = (e3_match){length, end};
        else if (length > out[at].length) out[at] = (e3_match){length, end};
    }
    return found;
}
