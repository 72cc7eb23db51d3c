#include "eagle3.h"

#include <string.h>

static int32_t layer_of(const e3_capture *c, const char *name) {
    for (int32_t l = 0; l < c->n_layers; l++)
        if (strcmp(c->names[l], name) == 0) return l;
    return -1;
}

/* Append the rows of one ubatch of layer l. */
static const char *copy_rows(e3_capture *c, const void *tensor, int32_t l) {
    size_t n = (size_t)c->api->tensor_elements(tensor) / c->width;
    if (c->api->tensor_bytes(tensor) != n * c->width * sizeof(float)) return "is not float32 rows of the expected width";
    if (!c->api->tensor_contiguous(tensor)) return "is not contiguous";
    if (n > c->capacity - c->seen[l]) return "has more rows than were announced";
    c->api->tensor_get(tensor, c->scratch, 0, n * c->width * sizeof(float));
    size_t stride = (size_t)c->n_layers * c->width;
    float *out = c->rows + c->seen[l] * stride + (size_t)l * c->width;
    for (size_t i = 0; i < n; i++) memcpy(out + i * stride, c->scratch + i * c->width, c->width * sizeof(float));
    c->seen[l] += n;
    return NULL;
}

bool e3_capture_eval(void *tensor, bool ask, void *capture) {
    e3_capture *c = capture;
    if (c->paused) return !ask;
    int32_t l = layer_of(c, c->api->tensor_name(tensor));
    if (ask) return l >= 0;
    const char *fault = l >= 0 ? copy_rows(c, tensor, l) : NULL;
    if (fault && !c->fault) c->fault = fault;
    return true;
}

void e3_capture_reset(e3_capture *c) {
    memset(c->seen, 0, sizeof c->seen);
    c->fault = NULL;
}
