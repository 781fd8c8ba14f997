// kvell.device._host: maps and unmaps chunks of a memfd, many in a call.
//
// Arrays come as addresses of int32 values, which kvell/device/host.py has checked. Each call
// answers how many chunks it did, from the front, and the errno that ended it (0: none); what
// failed has changed nothing. tests/oracle/host_calls.py is its twin in Python.
#include <nanobind/nanobind.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdint>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

constexpr size_t kSmallPage = 4096;
constexpr int kBare = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

const int32_t* ints(uintptr_t address) { return reinterpret_cast<const int32_t*>(address); }

char* at(uintptr_t address, int64_t chunk_bytes, int64_t position) {
  return reinterpret_cast<char*>(address) + chunk_bytes * position;
}

// Length of the run that begins at `from`: consecutive in both arrays (the second may be null).
int64_t run_length(const int32_t* a, const int32_t* b, int64_t from, int64_t count) {
  int64_t length = 1;
  while (from + length < count && a[from + length] == a[from] + length &&
         (!b || b[from + length] == b[from] + length))
    ++length;
  return length;
}

// An aligned range of addresses with nothing behind them; (address, errno).
nb::tuple reserve(int64_t size_bytes, int64_t alignment) {
  void* got = mmap(nullptr, size_t(size_bytes + alignment), PROT_NONE, kBare, -1, 0);
  if (got == MAP_FAILED) return nb::make_tuple(0, errno);
  const uintptr_t raw = reinterpret_cast<uintptr_t>(got);
  const uintptr_t start = (raw + alignment - 1) / alignment * alignment;
  if (start > raw) munmap(got, start - raw);
  const uintptr_t end = start + size_bytes, raw_end = raw + size_bytes + alignment;
  if (raw_end > end) munmap(reinterpret_cast<void*>(end), raw_end - end);
  return nb::make_tuple(start, 0);
}

int release(uintptr_t address, int64_t size_bytes) {
  return munmap(reinterpret_cast<void*>(address), size_t(size_bytes)) ? errno : 0;
}

nb::tuple map_chunks(uintptr_t address, int descriptor, int64_t chunk_bytes, uintptr_t positions,
                     uintptr_t chunks, int64_t count, bool populate) {
  const int32_t *to = ints(positions), *from = ints(chunks);
  int64_t done = 0;
  int error = 0;
  {
    nb::gil_scoped_release free_to_run;
    while (done < count) {
      const int64_t run = run_length(to, from, done, count);
      char* where = at(address, chunk_bytes, to[done]);
      const size_t size = size_t(run * chunk_bytes);
      if (mmap(where, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor,
               off_t(chunk_bytes * from[done])) == MAP_FAILED) {
        error = errno;
        break;
      }
      if (populate) madvise(where, size, MADV_POPULATE_WRITE);  // else the first touch does it
      done += run;
    }
  }
  return nb::make_tuple(done, error);
}

// Puts the whole of another process's file behind an address, to be read only; errno.
int map_readable(uintptr_t address, int descriptor, int64_t size_bytes) {
  void* where = reinterpret_cast<void*>(address);
  const int flags = MAP_SHARED | MAP_FIXED;
  return mmap(where, size_t(size_bytes), PROT_READ, flags, descriptor, 0) == MAP_FAILED ? errno : 0;
}

// Leaves a range of addresses bare; errno.
int unmap_range(uintptr_t address, int64_t size_bytes) {
  void* where = reinterpret_cast<void*>(address);
  return mmap(where, size_t(size_bytes), PROT_NONE, kBare | MAP_FIXED, -1, 0) == MAP_FAILED ? errno
                                                                                           : 0;
}

nb::tuple unmap_chunks(uintptr_t address, int64_t chunk_bytes, uintptr_t positions,
                       int64_t count) {
  const int32_t* which = ints(positions);
  int64_t done = 0;
  int error = 0;
  {
    nb::gil_scoped_release free_to_run;
    while (done < count) {
      const int64_t run = run_length(which, nullptr, done, count);
      char* where = at(address, chunk_bytes, which[done]);
      if (mmap(where, size_t(run * chunk_bytes), PROT_NONE, kBare | MAP_FIXED, -1, 0) ==
          MAP_FAILED) {
        error = errno;
        break;
      }
      done += run;
    }
  }
  return nb::make_tuple(done, error);
}

// Puts memory behind chunks of a mapped range, in huge pages where the system can;
// (how many, how many of them huge, errno).
nb::tuple commit_chunks(uintptr_t address, int64_t chunk_bytes, uintptr_t positions,
                        int64_t count) {
  const int32_t* which = ints(positions);
  int64_t done = 0, huge = 0;
  int error = 0;
  {
    nb::gil_scoped_release free_to_run;
    for (; done < count; ++done) {
      char* where = at(address, chunk_bytes, which[done]);
      // Nothing collapses where nothing is, so a first small page comes first.
      if (madvise(where, kSmallPage, MADV_POPULATE_WRITE)) {
        error = errno;
        break;
      }
      if (!madvise(where, size_t(chunk_bytes), MADV_COLLAPSE)) {
        ++huge;
      } else if (madvise(where, size_t(chunk_bytes), MADV_POPULATE_WRITE)) {
        error = errno;
        break;
      }
    }
  }
  return nb::make_tuple(done, huge, error);
}

}  // namespace

NB_MODULE(_host, m) {
  m.def("reserve", &reserve, "size_bytes"_a, "alignment"_a);
  m.def("release", &release, "address"_a, "size_bytes"_a);
  m.def("map_chunks", &map_chunks, "address"_a, "descriptor"_a, "chunk_bytes"_a, "positions"_a,
        "chunks"_a, "count"_a, "populate"_a);
  m.def("map_readable", &map_readable, "address"_a, "descriptor"_a, "size_bytes"_a);
  m.def("unmap_range", &unmap_range, "address"_a, "size_bytes"_a);
  m.def("unmap_chunks", &unmap_chunks, "address"_a, "chunk_bytes"_a, "positions"_a, "count"_a);
  m.def("commit_chunks", &commit_chunks, "address"_a, "chunk_bytes"_a, "positions"_a, "count"_a);
}
