/* An NVTX tool for tests: writes the name of every range to the file that EAGLEX_RANGES names, as its domain/name. */
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
#include <stdlib.h>

struct domain {
  char name[64];
};

static FILE* out;

static nvtxDomainHandle_t create(const char* name) {
  struct domain* made = calloc(1, sizeof(*made));
  snprintf(made->name, sizeof(made->name), "%s", name);
  return (nvtxDomainHandle_t)made;
}

static int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  fprintf(out, "%s/%s\n", domain ? ((struct domain*)domain)->name : "", event->message.ascii);
  fflush(out);
  return 0;
}

static int pop(nvtxDomainHandle_t domain) {
  fprintf(out, "%s/\n", domain ? ((struct domain*)domain)->name : "");
  fflush(out);
  return 0;
}

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t table_of) {
  const NvtxExportTableCallbacks* table = table_of(NVTX_ETID_CALLBACKS);
  NvtxFunctionTable functions = NULL;
  unsigned int size = 0;
  out = fopen(getenv("EAGLEX_RANGES"), "a");
  if (!out || !table || !table->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &size)) return 0;
  *functions[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create;
  *functions[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
  *functions[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
  return 1;
}
