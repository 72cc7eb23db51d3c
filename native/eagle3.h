/* The C parts of eagle3: what would cost as much as the models if Python did it row by row.

   kernels.c   top-k with log-sum-exp, argmax, row gathering,
               n-gram matches                                   pure C on arrays
   capture.c   the eval callback that copies hidden states      calls ggml through the table below
   batch.c     filling llama_batch_ext                          calls llama.cpp through the table below
   plain.c     plain decoding, several tokens in one call       calls llama.cpp through the table below
   module.c    the Python module eagle3_cli._native             checks arguments, releases the GIL

   Nothing here links against llama.cpp.  Python hands over the addresses of the public functions that the
   loaded library exports (e3_api), so one build serves every backend and survives upgrades of the library. */

#ifndef EAGLE3_H
#define EAGLE3_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Mirrors `struct llama_embd` of llama.h; passed by value. */
typedef struct {
    const float *data;
    size_t n_rows;
    size_t n_embd;
} e3_embd;

/* Public functions of llama.h, ggml.h and ggml-backend.h, by their own names without the prefix. */
typedef struct {
    void (*batch_clear)(void *batch);
    int32_t (*batch_add_token)(void *batch, int32_t seq, int32_t token);
    int32_t (*batch_add_embd)(void *batch, int32_t seq, e3_embd embd);
    bool (*batch_add_seq)(void *batch, int32_t row, int32_t seq);
    bool (*batch_set_embd)(void *batch, int32_t row, e3_embd embd);
    bool (*batch_set_pos)(void *batch, int32_t row, const int32_t *pos);
    bool (*batch_set_output)(void *batch, int32_t row, bool output);
    int32_t (*process)(void *context, int type, void *batch);
    const float *(*logits_ith)(void *context, int32_t row);
    int32_t (*sample)(void *sampler, void *context, int32_t row);
    bool (*is_end)(const void *vocab, int32_t token);
    int64_t (*time_us)(void);
    const char *(*tensor_name)(const void *tensor);
    int64_t (*tensor_elements)(const void *tensor);
    size_t (*tensor_bytes)(const void *tensor);
    bool (*tensor_contiguous)(const void *tensor);
    void (*tensor_get)(const void *tensor, void *data, size_t offset, size_t size);
} e3_api;

/* --- kernels.c ------------------------------------------------------------------------------------- */

/* k most probable ids of one row of logits, restricted to a sub-vocabulary.
     logits  float [>= max(d2t)+1, or n where d2t is NULL]
     scale   positive factor of every logit; 1 leaves them as they are
     d2t     int32 [n] position in `logits` of each candidate, in any order; NULL for 0..n-1
     work    float [n] scratch
     ids     int32 [k] out, positions in `logits`, by falling logit, ties by the earlier candidate; -1 where fewer
             than k candidates are above -infinity
     logps   float [k] out, natural log of the softmax over the n candidates; -infinity beside an id of -1
   Equivalent to  z = scale * logits[d2t]; o = np.argsort(-z, kind="stable")[:k]; d2t[o], (z - logsumexp(z))[o].
   NaN logits are never chosen.  Cannot fail. */
void e3_topk(const float *logits, float scale, const int32_t *d2t, int32_t n, int32_t k, float *work, int32_t *ids,
             float *logps);

/* Position of the largest of n > 0 floats, the first of equals, NaN left out; -1 if it is not finite.
   Equivalent to np.nanargmax.  This is what llama.cpp's greedy sampler chooses. */
int32_t e3_argmax(const float *logits, int32_t n);

/* out[i] = rows[index[i]] for i < n; rows and out are float [., width] and do not overlap. */
void e3_gather(const float *rows, const int32_t *index, int32_t n, size_t width, float *out);

/* An earlier occurrence of the last tokens of a text: `length` tokens agree with its end, and text[end] followed. */
typedef struct {
    int32_t length, end;
} e3_match;

/* The best match of each token that ever followed, in the order in which they are found, from the newest to the oldest.
     text      int32 [n]
     shortest  tokens that have to agree, at least 1; longest: most that are compared, at least `shortest`
     checked   occurrences that are looked at, at most
     out       [checked]
   Returns how many.  The longer match is better, then the newer one.  A match may overlap the end of the text. */
int32_t e3_matches(const int32_t *text, int32_t n, int32_t shortest, int32_t longest, int32_t checked, e3_match *out);

/* --- capture.c ------------------------------------------------------------------------------------- */

enum { E3_MAX_LAYERS = 8, E3_MAX_NAME = 64 };

/* What the eval callback copies.  Row i of `rows` is [layer 0 | layer 1 | ...] of the i-th batch row, the
   order in which the drafter's encoder wants them.  One process call fills it from row 0 on, ubatch after
   ubatch; `seen[l]` counts the rows of layer l.  The owner keeps it alive as long as the context lives. */
typedef struct {
    const e3_api *api;
    int32_t n_layers;
    char names[E3_MAX_LAYERS][E3_MAX_NAME]; /* graph tensor names, e.g. "l_out-14" */
    size_t width;                           /* floats per row and layer */
    size_t capacity;                        /* rows */
    float *rows;                            /* [capacity, n_layers * width] */
    float *scratch;                         /* [capacity, width] */
    size_t seen[E3_MAX_LAYERS];
    const char *fault;                      /* first thing that went wrong since reset, or NULL */
    bool paused;                            /* nothing is wanted: the graph is computed without a stop */
} e3_capture;

/* A ggml_backend_sched_eval_callback.  ask: is this tensor wanted?  Otherwise: copy it.
   Never stops the computation; what goes wrong is left in `fault`. */
bool e3_capture_eval(void *tensor, bool ask, void *capture);

void e3_capture_reset(e3_capture *capture);

/* --- batch.c --------------------------------------------------------------------------------------- */

/* Rows of one batch.  Row i carries tokens[i] and, where `features` is set, features[i]; it sits at pos[i] in
   the sequences seqs[seq_start[i]] .. seqs[seq_start[i+1]-1] (at least one) and asks for logits if outputs[i]. */
typedef struct {
    int32_t n;
    const int32_t *tokens;    /* [n], or NULL: rows of features alone (the encoder) */
    const int32_t *pos;       /* [n] */
    const int32_t *seq_start; /* [n+1], or NULL: every row in sequence 0 */
    const int32_t *seqs;
    const int8_t *outputs;    /* [n], or NULL: none asks */
    const float *features;    /* [n, width], or NULL */
    size_t width;
} e3_rows;

/* Clear the batch and add the rows.  Returns NULL, or what llama.cpp refused. */
const char *e3_batch_fill(const e3_api *api, void *batch, const e3_rows *rows);

/* --- plain.c --------------------------------------------------------------------------------------- */

/* Plain decoding that nobody has to look at between two tokens.  After a pass over many MB of weights the caches have
   forgotten what an interpreter needs, so going back to it for each token costs ten times what its work takes.
     context, batch  a llama_context and the llama_batch_ext that feeds it
     vocab           llama_vocab; tokens that end an answer end the call.  NULL: none does
     sampler         llama_sampler; NULL: the largest logit is taken
     text            int32 [n + most], n > 0: the last token of the first n, the root, is decoded first; emitted tokens
                     follow them
     position        of the root in sequence 0
     repeating       the call ends where the text's last `repeating` tokens occurred in it before; 0: it does not
     limit           seconds after which no further token is begun
     seconds         float [most] out, of each token's pass */
typedef struct {
    void *context, *batch;
    const void *vocab;
    void *sampler;
    int32_t n_vocab;
    int32_t *text;
    int32_t n, most;
    int32_t position;
    int32_t repeating;
    double limit;
    float *seconds;
} e3_plain;

/* What it did.  At most one of the last three is set: then the pass behind the `emitted` tokens failed. */
typedef struct {
    int32_t emitted;
    double sampling;     /* seconds in the sampler */
    const char *refused; /* what llama_batch_ext refused, or NULL */
    int32_t code;        /* llama_process's, or 0 */
    bool no_numbers;     /* there are no logits, or they are not numbers */
} e3_run;

/* Decode until `most` tokens are emitted, or one of the other ends above. */
e3_run e3_decode_plain(const e3_api *api, const e3_plain *plain);

#endif
