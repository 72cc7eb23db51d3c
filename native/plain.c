#include "eagle3.h"

#include <math.h>

enum { DECODE = 1 }; /* llama_process_type */

/* One pass over one token.  Returns its logits; NULL where `run` says what went wrong. */
static const float *pass(const e3_api *api, const e3_plain *p, int32_t token, int32_t position, e3_run *run) {
    const int8_t asks = 1;
    const e3_rows row = {.n = 1, .tokens = &token, .pos = &position, .outputs = &asks};
    run->refused = e3_batch_fill(api, p->batch, &row);
    if (run->refused) return NULL;
    run->code = api->process(p->context, DECODE, p->batch);
    const float *logits = run->code ? NULL : api->logits_ith(p->context, 0);
    run->no_numbers = !run->code && (!logits || isnan(logits[0]));
    return run->no_numbers ? NULL : logits;
}

static bool repeats(const int32_t *text, int32_t n, int32_t length) {
    e3_match match;
    return length > 0 && e3_matches(text, n, length, length, 1, &match) > 0;
}

e3_run e3_decode_plain(const e3_api *api, const e3_plain *p) {
    e3_run run = {0};
    const int64_t start = api->time_us();
    int32_t *next = p->text + p->n;
    for (bool more = true; more && run.emitted < p->most; next++) {
        const int64_t before = api->time_us();
        const float *logits = pass(api, p, next[-1], p->position + run.emitted, &run);
        const int64_t between = api->time_us();
        if (!logits) break;
        *next = p->sampler ? api->sample(p->sampler, p->context, 0) : e3_argmax(logits, p->n_vocab);
        run.no_numbers = *next < 0;
        if (run.no_numbers) break;
        const int64_t after = api->time_us();
        p->seconds[run.emitted++] = 1e-6f * (float)(between - before);
        run.sampling += p->sampler ? 1e-6 * (double)(after - between) : 0.0;
        more = !(p->vocab && api->is_end(p->vocab, *next)) && 1e-6 * (double)(after - start) < p->limit &&
               !repeats(p->text, p->n + run.emitted, p->repeating);
    }
    return run;
}
