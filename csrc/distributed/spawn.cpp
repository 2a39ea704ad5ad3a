// The processes of ranks: signals that are passed on to them, and their end with the process that has started them.

#include <sys/types.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#include "border/guarded.h"
#include "distributed/shim_distributed.h"

namespace {

// The signals that end a program unless it handles them, and that torchrun passes on, too.
constexpr std::array<int, 4> kSignals = {SIGHUP, SIGINT, SIGQUIT, SIGTERM};

std::atomic<int> caught{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler may not wait for a lock");

std::array<struct sigaction, kSignals.size()> before;

void remember(int signal) { caught.store(signal); }

// A program that ignores a signal, for instance under nohup, goes on ignoring it.
bool is_ignored(const struct sigaction &action) {
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

extern "C" {

void tamp_signals_catch(char **err) noexcept {
  tamp::guarded(err, [] {
    struct sigaction action = {};
    action.sa_handler = remember;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    caught.store(0);
    for (size_t i = 0; i < kSignals.size(); i++) {
      TORCH_CHECK(sigaction(kSignals[i], nullptr, &before[i]) == 0, "sigaction: ", std::strerror(errno));
    }
    for (size_t i = 0; i < kSignals.size(); i++) {
      if (!is_ignored(before[i])) sigaction(kSignals[i], &action, nullptr);
    }
  });
}

void tamp_signals_release() noexcept {
  for (size_t i = 0; i < kSignals.size(); i++) sigaction(kSignals[i], &before[i], nullptr);
}

int64_t tamp_signals_caught() noexcept { return caught.exchange(0); }

void tamp_process_signal(int64_t process, int64_t signal, char **err) noexcept {
  tamp::guarded(err, [&] {
    const auto pid = static_cast<pid_t>(process);
    const auto number = static_cast<int>(signal);
    // It may have left the process group that it has been started in. A zombie takes any signal.
    const bool is_sent = kill(-pid, number) == 0 || kill(pid, number) == 0;
    TORCH_CHECK(is_sent, "kill: ", std::strerror(errno));
    // A stopped process does not end before it continues.
    if (kill(-pid, SIGCONT) != 0) kill(pid, SIGCONT);
  });
}

int64_t tamp_process_end_with(int64_t parent) noexcept {
#ifdef __linux__
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return errno;
#endif
  // The parent may have ended before.
  return getppid() == static_cast<pid_t>(parent) ? 0 : ESRCH;
}

}  // extern "C"
