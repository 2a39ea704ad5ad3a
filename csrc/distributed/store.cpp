// Stores, through which the ranks of a group find each other.

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <unistd.h>

#include <string>
#include <vector>

#include "distributed/distributed.h"

using std::chrono::milliseconds;
using tamp::distributed::given;

extern "C" {

tamp_store *tamp_store_tcp(const char *host, uint32_t port, uint8_t serve, int64_t listener, int64_t timeout_ms,
                           char **err) noexcept {
  bool owned = listener >= 0;
  auto *out = tamp::guarded(err, [&]() -> tamp_store * {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port);
    options.isServer = serve != 0;
    options.timeout = milliseconds(timeout_ms);
    // Stores of one process can share a port, as in Python. The ranks wait for each other when they form a group.
    options.multiTenant = listener < 0;
    options.waitWorkers = false;
    if (listener >= 0) options.masterListenFd = static_cast<int>(listener);
    // From here on the server closes the socket.
    owned = false;
    return new tamp_store{c10::make_intrusive<c10d::TCPStore>(host, options)};
  });
  if (owned) close(static_cast<int>(listener));
  return out;
}

tamp_store *tamp_store_in_process(int64_t timeout_ms, char **err) noexcept {
  return tamp::guarded(err, [&]() -> tamp_store * {
    auto store = c10::make_intrusive<c10d::HashStore>();
    store->setTimeout(milliseconds(timeout_ms));
    return new tamp_store{std::move(store)};
  });
}

void tamp_store_set(const tamp_store *store, const char *key, const char *value, char **err) noexcept {
  tamp::guarded(err, [&] { given(store).store->set(key, value); });
}

char *tamp_store_get(const tamp_store *store, const char *key, int64_t timeout_ms, char **err) noexcept {
  return tamp::guarded(err, [&] {
    c10d::Store &s = *given(store).store;
    s.wait({key}, milliseconds(timeout_ms));
    return tamp::message(s.get_to_str(key).c_str());
  });
}

int64_t tamp_store_count(const tamp_store *store, const char *key, char **err) noexcept {
  return tamp::guarded(err, [&] { return given(store).store->add(key, 1); });
}

uint8_t tamp_store_has(const tamp_store *store, const char *key, char **err) noexcept {
  return tamp::guarded(err, [&] { return static_cast<uint8_t>(given(store).store->check({key})); });
}

void tamp_store_wait(const tamp_store *store, const char *const *keys, size_t count, int64_t timeout_ms,
                     char **err) noexcept {
  tamp::guarded(err, [&] {
    const std::vector<std::string> all(keys, keys + count);
    given(store).store->wait(all, milliseconds(timeout_ms));
  });
}

void tamp_store_free(tamp_store *store) noexcept {
  char *err = nullptr;
  tamp::contained(&err, [&] { delete store; });
  tamp_string_free(err);
}

}  // extern "C"
