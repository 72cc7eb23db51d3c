/* eagle3_cli._native: argument checks around the cores in eagle3.h.  Arrays come through the buffer protocol
   (C-contiguous, exact item type); addresses of llama.cpp objects come as integers and cannot be checked. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "eagle3.h"

static e3_api api;

/* --- arguments ------------------------------------------------------------------------------------- */

typedef struct {
    Py_buffer view;
    bool held;
} Array;

static void release(Array *a) {
    if (a->held) PyBuffer_Release(&a->view);
    a->held = false;
}

static Py_ssize_t length(const Array *a) { return a->held ? a->view.len / a->view.itemsize : 0; }

static bool require(bool holds, const char *message) {
    if (!holds) PyErr_SetString(PyExc_ValueError, message);
    return holds;
}

/* Take a C-contiguous array of items 'i' (int32), 'b' (int8) or 'f' (float32).  None leaves it empty. */
static bool take(PyObject *object, const char *name, char item, bool writable, Array *a) {
    a->held = false;
    if (object == Py_None) return true;
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, &a->view, flags) < 0) return false;
    a->held = true;
    const char *format = a->view.format ? a->view.format : "B";
    Py_ssize_t size = item == 'b' ? 1 : 4;
    bool same = format[0] == item || (item == 'i' && format[0] == 'l');
    if (same && format[1] == '\0' && a->view.itemsize == size) return true;
    PyErr_Format(PyExc_TypeError, "%s: expected an array of '%c', got '%s'", name, item, format);
    release(a);
    return false;
}

/* --- bind ------------------------------------------------------------------------------------------ */

static const struct {
    const char *name;
    size_t offset;
} functions[] = {
    {"llama_batch_ext_clear", offsetof(e3_api, batch_clear)},
    {"llama_batch_ext_add_token", offsetof(e3_api, batch_add_token)},
    {"llama_batch_ext_add_embd", offsetof(e3_api, batch_add_embd)},
    {"llama_batch_ext_add_seq", offsetof(e3_api, batch_add_seq)},
    {"llama_batch_ext_set_embd_token", offsetof(e3_api, batch_set_embd)},
    {"llama_batch_ext_set_pos", offsetof(e3_api, batch_set_pos)},
    {"llama_batch_ext_set_output_logits", offsetof(e3_api, batch_set_output)},
    {"llama_process", offsetof(e3_api, process)},
    {"llama_get_logits_ith", offsetof(e3_api, logits_ith)},
    {"llama_sampler_sample", offsetof(e3_api, sample)},
    {"llama_vocab_is_eog", offsetof(e3_api, is_end)},
    {"ggml_time_us", offsetof(e3_api, time_us)},
    {"ggml_get_name", offsetof(e3_api, tensor_name)},
    {"ggml_nelements", offsetof(e3_api, tensor_elements)},
    {"ggml_nbytes", offsetof(e3_api, tensor_bytes)},
    {"ggml_is_contiguous", offsetof(e3_api, tensor_contiguous)},
    {"ggml_backend_tensor_get", offsetof(e3_api, tensor_get)},
};
enum { N_FUNCTIONS = sizeof functions / sizeof functions[0] };

PyDoc_STRVAR(bind_doc, "bind(addresses)\n--\n\nTake the addresses of llama.cpp's functions, by name (see FUNCTIONS).");

static PyObject *bind(PyObject *self, PyObject *addresses) {
    e3_api bound;
    (void)self;
    if (!PyDict_Check(addresses)) return PyErr_Format(PyExc_TypeError, "addresses: expected a dict");
    for (int i = 0; i < N_FUNCTIONS; i++) {
        PyObject *number = PyDict_GetItemString(addresses, functions[i].name);
        if (!number) return PyErr_Format(PyExc_KeyError, "%s", functions[i].name);
        void *address = PyLong_AsVoidPtr(number);
        if (!address) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "%s: the address is null", functions[i].name);
            return NULL;
        }
        memcpy((char *)&bound + functions[i].offset, &address, sizeof address);
    }
    api = bound;
    Py_RETURN_NONE;
}

/* --- batch ----------------------------------------------------------------------------------------- */

PyDoc_STRVAR(fill_doc,
             "fill(batch, tokens, pos, seq_start, seqs, outputs, features)\n--\n\n"
             "Replace the rows of a llama_batch_ext; see e3_rows for the arrays.  tokens, seq_start, seqs,\n"
             "outputs and features may be None.  ValueError says what llama.cpp refused.");

static bool check_rows(const e3_rows *r, Array a[6]) {
    enum { TOKENS, POS, START, SEQS, OUTPUTS, FEATURES };
    if (!require(api.batch_clear != NULL, "bind() has not been called")) return false;
    if (!require(a[POS].held && r->n > 0, "pos: expected at least one row")) return false;
    if (!require(a[TOKENS].held || a[FEATURES].held, "expected tokens, features or both")) return false;
    if (!require(!a[TOKENS].held || length(&a[TOKENS]) == r->n, "tokens: expected one per row")) return false;
    if (!require(!a[OUTPUTS].held || length(&a[OUTPUTS]) == r->n, "outputs: expected one per row")) return false;
    if (!require(length(&a[FEATURES]) % r->n == 0, "features: expected one row of equal width per row")) return false;
    if (!a[START].held) return true;
    if (!require(length(&a[START]) == r->n + 1, "seq_start: expected one per row and one more")) return false;
    for (int32_t i = 0; i < r->n; i++)
        if (!require(r->seq_start[i] >= 0 && r->seq_start[i] < r->seq_start[i + 1], "seq_start: expected to rise")) return false;
    return require(r->seq_start[r->n] <= length(&a[SEQS]), "seqs: expected as many as seq_start says");
}

static PyObject *fill(PyObject *self, PyObject *args) {
    static const struct {
        const char *name;
        char item;
    } kinds[6] = {{"tokens", 'i'}, {"pos", 'i'}, {"seq_start", 'i'}, {"seqs", 'i'}, {"outputs", 'b'}, {"features", 'f'}};
    PyObject *batch, *objects[6];
    Array a[6] = {{.held = false}};
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOOOOO", &batch, objects, objects + 1, objects + 2, objects + 3, objects + 4, objects + 5))
        return NULL;
    void *address = PyLong_AsVoidPtr(batch);
    bool ok = !PyErr_Occurred() && require(address != NULL, "batch: expected an address");
    for (int i = 0; ok && i < 6; i++) ok = take(objects[i], kinds[i].name, kinds[i].item, false, &a[i]);

    e3_rows rows = {
        .n = (int32_t)length(&a[1]),
        .tokens = a[0].held ? a[0].view.buf : NULL,
        .pos = a[1].held ? a[1].view.buf : NULL,
        .seq_start = a[2].held ? a[2].view.buf : NULL,
        .seqs = a[3].held ? a[3].view.buf : NULL,
        .outputs = a[4].held ? a[4].view.buf : NULL,
        .features = a[5].held ? a[5].view.buf : NULL,
    };
    if (ok && (ok = check_rows(&rows, a))) {
        const char *fault;
        rows.width = (size_t)(length(&a[5]) / rows.n);
        Py_BEGIN_ALLOW_THREADS
        fault = e3_batch_fill(&api, address, &rows);
        Py_END_ALLOW_THREADS
        ok = fault == NULL;
        if (fault) PyErr_Format(PyExc_ValueError, "llama_batch_ext: %s", fault);
    }
    for (int i = 0; i < 6; i++) release(&a[i]);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

/* --- plain ----------------------------------------------------------------------------------------- */

PyDoc_STRVAR(plain_doc,
             "plain(context, batch, vocab, sampler, n_vocab, text, n, position, repeating, limit, seconds)\n--\n\n"
             "Decode plainly; see e3_plain for the arguments.  The first four are addresses, vocab and sampler may be 0.\n"
             "text int32 and seconds float32 are written; seconds has room for `most` tokens, text for `most` behind n.\n"
             "Returns (emitted, seconds in the sampler, code, no numbers); ValueError says what llama.cpp refused.");

static PyObject *plain(PyObject *self, PyObject *args) {
    PyObject *addresses[4], *text, *seconds;
    void *pointers[4];
    Array tokens = {.held = false}, took = {.held = false};
    e3_plain p = {0};
    e3_run run = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOOiOiiidO", addresses, addresses + 1, addresses + 2, addresses + 3, &p.n_vocab, &text, &p.n,
                          &p.position, &p.repeating, &p.limit, &seconds))
        return NULL;
    for (int i = 0; i < 4; i++) {
        pointers[i] = PyLong_AsVoidPtr(addresses[i]);
        if (PyErr_Occurred()) return NULL;
    }
    p.context = pointers[0], p.batch = pointers[1], p.vocab = pointers[2], p.sampler = pointers[3];
    bool ok = require(api.batch_clear != NULL, "bind() has not been called") &&
              require(p.context && p.batch, "context, batch: expected addresses") &&
              require(p.n_vocab > 0 && p.position >= 0 && p.repeating >= 0, "n_vocab, position, repeating: out of range") &&
              take(text, "text", 'i', true, &tokens) && take(seconds, "seconds", 'f', true, &took) &&
              require(length(&took) > 0 && length(&took) <= INT32_MAX, "seconds: expected room for a token") &&
              require(p.n > 0 && length(&tokens) - p.n >= length(&took), "text: expected a root, and room behind it") &&
              require(p.position <= INT32_MAX - length(&took), "position: out of range");
    if (ok) {
        p.text = tokens.view.buf, p.seconds = took.view.buf, p.most = (int32_t)length(&took);
        Py_BEGIN_ALLOW_THREADS
        run = e3_decode_plain(&api, &p);
        Py_END_ALLOW_THREADS
        ok = run.refused == NULL;
        if (!ok) PyErr_Format(PyExc_ValueError, "llama_batch_ext: %s", run.refused);
    }
    release(&tokens);
    release(&took);
    return ok ? Py_BuildValue("idiO", run.emitted, run.sampling, run.code, run.no_numbers ? Py_True : Py_False) : NULL;
}

/* --- kernels --------------------------------------------------------------------------------------- */

PyDoc_STRVAR(topk_doc,
             "topk(logits, stride, d2t, n, ids, logps, k, scales=None)\n--\n\n"
             "k most probable ids of each row; see e3_topk.  logits is the address of rows `stride` floats apart,\n"
             "d2t an int32 array of n candidates or None; ids int32 and logps float32 [rows, k] are written.\n"
             "scales float32 [rows] multiplies each row's logits; None is 1.");

static PyObject *topk(PyObject *self, PyObject *args) {
    PyObject *logits, *d2t, *ids, *logps, *scales = Py_None;
    Py_ssize_t stride, n;
    int k;
    Array index = {.held = false}, out_ids = {.held = false}, out_logps = {.held = false}, factors = {.held = false};
    float *work = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "OnOnOOi|O", &logits, &stride, &d2t, &n, &ids, &logps, &k, &scales)) return NULL;
    const float *z = PyLong_AsVoidPtr(logits);
    bool ok = !PyErr_Occurred() && require(z != NULL, "logits: expected an address") &&
              take(d2t, "d2t", 'i', false, &index) && take(ids, "ids", 'i', true, &out_ids) &&
              take(logps, "logps", 'f', true, &out_logps) && take(scales, "scales", 'f', false, &factors) &&
              require(k > 0, "k: expected at least 1") &&
              require(n > 0 && n <= stride && n <= INT32_MAX, "n: expected 1 to stride candidates") &&
              require(!index.held || length(&index) == n, "d2t: expected n candidates") &&
              require(out_ids.held && out_logps.held && length(&out_ids) == length(&out_logps) && length(&out_ids) % k == 0,
                      "ids, logps: expected [rows, k]") &&
              require(!factors.held || length(&factors) == length(&out_ids) / k, "scales: expected one per row");
    const int32_t *candidates = index.held ? index.view.buf : NULL;
    for (Py_ssize_t i = 0; ok && candidates && i < n; i++)
        ok = require(candidates[i] >= 0 && candidates[i] < stride, "d2t: expected positions inside a row");
    if (ok && !(work = PyMem_RawMalloc((size_t)n * sizeof *work))) {
        PyErr_NoMemory();
        ok = false;
    }
    if (ok) {
        int32_t *row_ids = out_ids.view.buf;
        float *row_logps = out_logps.view.buf;
        const float *scale = factors.held ? factors.view.buf : NULL;
        Py_ssize_t rows = length(&out_ids) / k;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t r = 0; r < rows; r++)
            e3_topk(z + r * stride, scale ? scale[r] : 1.0f, candidates, (int32_t)n, k, work, row_ids + r * k,
                    row_logps + r * k);
        Py_END_ALLOW_THREADS
    }
    PyMem_RawFree(work);
    release(&index);
    release(&out_ids);
    release(&out_logps);
    release(&factors);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(argmax_doc, "argmax(logits, n)\n--\n\nPosition of the largest of n floats at an address; see e3_argmax.");

static PyObject *argmax(PyObject *self, PyObject *args) {
    PyObject *logits;
    int n, best;
    (void)self;
    if (!PyArg_ParseTuple(args, "Oi", &logits, &n)) return NULL;
    const float *z = PyLong_AsVoidPtr(logits);
    if (PyErr_Occurred() || !require(z && n > 0, "logits: expected an address and n > 0")) return NULL;
    Py_BEGIN_ALLOW_THREADS
    best = e3_argmax(z, n);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(best);
}

PyDoc_STRVAR(gather_doc,
             "gather(rows, index, out)\n--\n\n"
             "out[i] = rows[index[i]]; rows float32 [n, width], index int32 [m], out float32 [m, width].");

static PyObject *gather(PyObject *self, PyObject *args) {
    PyObject *objects[3];
    Array rows = {.held = false}, index = {.held = false}, out = {.held = false};
    (void)self;
    if (!PyArg_ParseTuple(args, "OOO", objects, objects + 1, objects + 2)) return NULL;
    bool ok = take(objects[0], "rows", 'f', false, &rows) && take(objects[1], "index", 'i', false, &index) &&
              take(objects[2], "out", 'f', true, &out);
    ok = ok && require(rows.held && index.held && out.held, "rows, index, out: expected arrays");
    Py_ssize_t m = length(&index), width = m ? length(&out) / m : 0;
    ok = ok && require(m == 0 || (width > 0 && m * width == length(&out)), "out: expected one row per index") &&
         require(m == 0 || length(&rows) % width == 0, "rows: expected rows as wide as out");
    const int32_t *at = index.held ? index.view.buf : NULL;
    for (Py_ssize_t i = 0; ok && i < m; i++)
        ok = require(at[i] >= 0 && at[i] < length(&rows) / width, "index: expected positions of rows");
    if (ok && m) {
        Py_BEGIN_ALLOW_THREADS
        e3_gather(rows.view.buf, at, (int32_t)m, (size_t)width, out.view.buf);
        Py_END_ALLOW_THREADS
    }
    release(&rows);
    release(&index);
    release(&out);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(matches_doc,
             "matches(text, shortest, longest, checked)\n--\n\n"
             "(length, end) of the earlier occurrences of the last tokens of an int32 array; see e3_matches.");

enum { MOST_CHECKED = 256 };

static PyObject *matches(PyObject *self, PyObject *args) {
    PyObject *object;
    int shortest, longest, checked;
    Array text = {.held = false};
    e3_match found[MOST_CHECKED];
    (void)self;
    if (!PyArg_ParseTuple(args, "Oiii", &object, &shortest, &longest, &checked)) return NULL;
    bool ok = require(shortest >= 1 && longest >= shortest, "shortest, longest: expected 1 <= shortest <= longest") &&
              require(checked >= 0 && checked <= MOST_CHECKED, "checked: expected 0 to 256") &&
              take(object, "text", 'i', false, &text) && require(length(&text) <= INT32_MAX, "text: too long");
    int32_t n = ok && text.held ? e3_matches(text.view.buf, (int32_t)length(&text), shortest, longest, checked, found) : 0;
    release(&text);
    PyObject *list = ok ? PyList_New(n) : NULL;
    for (int32_t i = 0; list && i < n; i++) {
        PyObject *pair = Py_BuildValue("(ii)", found[i].length, found[i].end);
        if (pair) PyList_SET_ITEM(list, i, pair);
        else Py_CLEAR(list);
    }
    return list;
}

/* --- Capture --------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    e3_capture capture;
    Py_ssize_t shape[2], strides[2];
} CaptureObject;

PyDoc_STRVAR(capture_doc,
             "Capture(names, width, capacity)\n--\n\n"
             "Copies named graph tensors while llama.cpp computes; see e3_capture.  Pass `callback` and `user_data` as\n"
             "cb_eval and cb_eval_user_data and keep the object alive as long as the context.  The buffer is float32\n"
             "[capacity, len(names) * width].");

static bool set_names(e3_capture *c, PyObject *names) {
    Py_ssize_t n = PySequence_Size(names);
    if (n < 0 || !require(n >= 1 && n <= E3_MAX_LAYERS, "names: expected 1 to 8")) return false;
    for (Py_ssize_t l = 0; l < n; l++) {
        PyObject *item = PySequence_GetItem(names, l);
        const char *name = item ? PyUnicode_AsUTF8(item) : NULL;
        bool ok = name && require(strlen(name) < E3_MAX_NAME, "names: expected fewer than 64 bytes each");
        if (ok) strcpy(c->names[l], name);
        Py_XDECREF(item);
        if (!ok) return false;
    }
    c->n_layers = (int32_t)n;
    return true;
}

static int capture_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"names", "width", "capacity", NULL};
    CaptureObject *self = (CaptureObject *)object;
    e3_capture *c = &self->capture;
    PyObject *names;
    Py_ssize_t width, capacity;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Onn", keywords, &names, &width, &capacity)) return -1;
    if (!require(c->rows == NULL, "a Capture is made once")) return -1;
    if (!require(api.tensor_name != NULL, "bind() has not been called")) return -1;
    if (!require(width > 0 && width < (1 << 24) && capacity > 0 && capacity < (1 << 24), "width, capacity: out of range")) return -1;
    if (!set_names(c, names)) return -1;
    c->api = &api;
    c->width = (size_t)width;
    c->capacity = (size_t)capacity;
    c->rows = PyMem_RawCalloc(c->capacity * (size_t)c->n_layers, c->width * sizeof(float));
    c->scratch = PyMem_RawMalloc(c->capacity * c->width * sizeof(float));
    if (!c->rows || !c->scratch) {
        PyErr_NoMemory();
        return -1;
    }
    self->shape[0] = capacity;
    self->shape[1] = c->n_layers * width;
    self->strides[0] = self->shape[1] * (Py_ssize_t)sizeof(float);
    self->strides[1] = sizeof(float);
    e3_capture_reset(c);
    return 0;
}

static void capture_dealloc(PyObject *object) {
    CaptureObject *self = (CaptureObject *)object;
    PyMem_RawFree(self->capture.rows);
    PyMem_RawFree(self->capture.scratch);
    Py_TYPE(object)->tp_free(object);
}

static int capture_buffer(PyObject *object, Py_buffer *view, int flags) {
    CaptureObject *self = (CaptureObject *)object;
    e3_capture *c = &self->capture;
    Py_ssize_t bytes = self->shape[0] * self->strides[0];
    if (!c->rows) {
        view->obj = NULL;
        PyErr_SetString(PyExc_BufferError, "the Capture was not initialised");
        return -1;
    }
    if (PyBuffer_FillInfo(view, object, c->rows, bytes, 0, flags) < 0) return -1;
    view->itemsize = sizeof(float);
    view->format = (flags & PyBUF_FORMAT) ? "f" : NULL;
    view->ndim = 2;
    view->shape = (flags & PyBUF_ND) ? self->shape : NULL;
    view->strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? self->strides : NULL;
    return 0;
}

static PyObject *capture_reset(PyObject *object, PyObject *unused) {
    (void)unused;
    e3_capture_reset(&((CaptureObject *)object)->capture);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(check_doc,
             "check(rows)\n--\n\n"
             "None if every tensor was seen with exactly so many rows since reset(), else what went wrong as text.");

static PyObject *capture_check(PyObject *object, PyObject *number) {
    e3_capture *c = &((CaptureObject *)object)->capture;
    size_t rows = PyLong_AsSize_t(number);
    if (PyErr_Occurred()) return NULL;
    for (int32_t l = 0; l < c->n_layers; l++) {
        if (c->fault) return PyUnicode_FromFormat("a captured tensor %s", c->fault);
        if (c->seen[l] != rows) return PyUnicode_FromFormat("%s: expected %zu rows, got %zu", c->names[l], rows, c->seen[l]);
    }
    Py_RETURN_NONE;
}

static PyObject *capture_callback(PyObject *object, void *unused) {
    bool (*eval)(void *, bool, void *) = e3_capture_eval;
    void *address;
    (void)object;
    (void)unused;
    memcpy(&address, &eval, sizeof address);
    return PyLong_FromVoidPtr(address);
}

static PyObject *capture_user_data(PyObject *object, void *unused) {
    (void)unused;
    return PyLong_FromVoidPtr(&((CaptureObject *)object)->capture);
}

static PyObject *capture_paused(PyObject *object, void *unused) {
    (void)unused;
    return PyBool_FromLong(((CaptureObject *)object)->capture.paused);
}

static int capture_pause(PyObject *object, PyObject *value, void *unused) {
    (void)unused;
    if (!require(value && PyBool_Check(value), "paused: expected a bool")) return -1;
    ((CaptureObject *)object)->capture.paused = value == Py_True;
    return 0;
}

static PyMethodDef capture_methods[] = {
    {"reset", capture_reset, METH_NOARGS, "reset()\n--\n\nForget the rows seen; call before each process."},
    {"check", capture_check, METH_O, check_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef capture_attributes[] = {
    {"callback", capture_callback, NULL, "Address of the eval callback.", NULL},
    {"user_data", capture_user_data, NULL, "Address of the C struct behind this object.", NULL},
    {"paused", capture_paused, capture_pause, "True: copy nothing, and let the graph run without a stop.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyBufferProcs capture_as_buffer = {capture_buffer, NULL};

static PyTypeObject CaptureType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "eagle3_cli._native.Capture",
    .tp_basicsize = sizeof(CaptureObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = capture_doc,
    .tp_new = PyType_GenericNew,
    .tp_init = capture_init,
    .tp_dealloc = capture_dealloc,
    .tp_methods = capture_methods,
    .tp_getset = capture_attributes,
    .tp_as_buffer = &capture_as_buffer,
};

/* --- module ---------------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"bind", bind, METH_O, bind_doc},
    {"fill", fill, METH_VARARGS, fill_doc},
    {"plain", plain, METH_VARARGS, plain_doc},
    {"topk", topk, METH_VARARGS, topk_doc},
    {"argmax", argmax, METH_VARARGS, argmax_doc},
    {"gather", gather, METH_VARARGS, gather_doc},
    {"matches", matches, METH_VARARGS, matches_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "eagle3_cli._native",
    .m_doc = "C cores of eagle3; native/eagle3.h documents them.",
    .m_size = -1,
    .m_methods = methods,
};

static PyObject *function_names(void) {
    PyObject *names = PyTuple_New(N_FUNCTIONS);
    for (int i = 0; names && i < N_FUNCTIONS; i++) {
        PyObject *name = PyUnicode_FromString(functions[i].name);
        if (!name) Py_CLEAR(names);
        else PyTuple_SET_ITEM(names, i, name);
    }
    return names;
}

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *m = PyType_Ready(&CaptureType) < 0 ? NULL : PyModule_Create(&module);
    PyObject *names = m ? function_names() : NULL;
    if (!names || PyModule_AddObjectRef(m, "FUNCTIONS", names) < 0 ||
        PyModule_AddObjectRef(m, "Capture", (PyObject *)&CaptureType) < 0)
        Py_CLEAR(m);
    Py_XDECREF(names);
    return m;
}
