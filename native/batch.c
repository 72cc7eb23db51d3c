#include "eagle3.h"

static const char *add_row(const e3_api *api, void *batch, const e3_rows *r, int32_t i) {
    int32_t first = r->seq_start ? r->seq_start[i] : 0;
    int32_t seq = r->seq_start ? r->seqs[first] : 0;
    e3_embd feature = {r->features ? r->features + (size_t)i * r->width : NULL, 1, r->width};

    int32_t row = r->tokens ? api->batch_add_token(batch, seq, r->tokens[i]) : api->batch_add_embd(batch, seq, feature);
    if (row == -1) return "the batch is full";
    if (row == -3) return "a sequence id is out of range";
    if (row != i) return "a token id or a feature row is invalid";
    if (r->seq_start)
        for (int32_t s = first + 1; s < r->seq_start[i + 1]; s++)
            if (!api->batch_add_seq(batch, row, r->seqs[s])) return "a sequence id is out of range";
    if (r->tokens && r->features && !api->batch_set_embd(batch, row, feature)) return "a feature row has the wrong width";
    if (!api->batch_set_pos(batch, row, r->pos + i)) return "a position was refused";
    if (!api->batch_set_output(batch, row, r->outputs && r->outputs[i])) return "an output flag was refused";
    return NULL;
}

const char *e3_batch_fill(const e3_api *api, void *batch, const e3_rows *rows) {
    api->batch_clear(batch);
    for (int32_t i = 0; i < rows->n; i++) {
        const char *fault = add_row(api, batch, rows, i);
        if (fault) return fault;
    }
    return NULL;
}
