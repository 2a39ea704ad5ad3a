#include "faults.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace simulated {
namespace {

const char *name_of_devices = nullptr;
Where (*locate_address)(const void *) = nullptr;
struct sigaction before = {};

// Says whose memory was touched, and lets the instruction fault again with what was there before: a core, a debugger.
void on_fault(int signal, siginfo_t *info, void *context) {
  const auto [device, offset] = locate_address(info->si_addr);
  if (device >= 0) {
    char text[160];
    const int n =
        snprintf(text, sizeof text, "%s: host code touches the memory of cuda:%d at offset %zu; copy it first\n",
                 name_of_devices, device, offset);
    if (write(STDERR_FILENO, text, static_cast<size_t>(n)) < 0) abort();
  } else if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(signal, info, context);
    return;
  }
  sigaction(SIGSEGV, &before, nullptr);
}

}  // namespace

bool tell_faults(const char *name, Where (*locate)(const void *)) {
  name_of_devices = name;
  locate_address = locate;
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  return sigaction(SIGSEGV, &action, &before) == 0;
}

}  // namespace simulated
