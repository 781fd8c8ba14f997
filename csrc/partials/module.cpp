// The Python face of what asks others for sections, and of what answers. A pass in Python calls `Away`
// itself, layer by layer; the compiled one (csrc/forward) is given it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "attention/arguments.h"
#include "away.h"
#include "service.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvell {
namespace {

using ServedRule = std::tuple<float, float, int32_t>;      // scale, softcap, window
using ServedArgs = std::tuple<LayerArgs, ServedRule, int>;  // and its group
using AwayArgs = std::tuple<int32_t, int32_t, int32_t, int32_t, std::vector<uint64_t>>;

std::chrono::nanoseconds span_of(double seconds) {
  if (!(seconds >= 0) || seconds > 1e6) refuse("seconds: from 0 to a million");
  return std::chrono::nanoseconds(int64_t(seconds * 1e9));
}

// A creditor in Python: bytes out by one function, bytes in by another.
class CalledCreditor : public Creditor {
 public:
  CalledCreditor(int64_t room_bytes, nb::callable post, nb::callable take)
      : room_bytes_(room_bytes), post_(std::move(post)), take_(std::move(take)) {}

  int64_t room_bytes() const override { return room_bytes_; }

  uint8_t* begin(int64_t query_bytes) override {
    query_.assign(size_t(query_bytes), 0);
    return query_.data();
  }

  bool post() override {
    nb::gil_scoped_acquire acquire;
    return nb::cast<bool>(post_(nb::bytes(reinterpret_cast<const char*>(query_.data()), query_.size())));
  }

  AnswerBytes take(Deadline deadline) override {
    const std::chrono::duration<double> left = deadline - std::chrono::steady_clock::now();
    nb::gil_scoped_acquire acquire;
    const nb::object answer = take_(std::max(0.0, left.count()));
    if (answer.is_none()) return {nullptr, 0};
    const auto bytes = nb::cast<nb::bytes>(answer);
    answer_.assign(bytes.c_str(), bytes.c_str() + bytes.size());
    return {answer_.data(), int64_t(answer_.size())};
  }

 private:
  const int64_t room_bytes_;
  nb::callable post_, take_;
  std::vector<uint8_t> query_, answer_;
};

// Loans and the service that reads them, as one thing.
class Answering {
 public:
  Answering(const std::string& instruction_set, int element, int32_t heads, const std::vector<ServedArgs>& layers,
            const std::tuple<uintptr_t, int64_t>& words)
      : loans_(at<const uint64_t>(std::get<0>(words)), std::get<1>(words)),
        service_(backend_of(instruction_set), static_cast<Element>(element), heads, layers_of(layers), loans_) {}

  void lend(uint64_t right, int debtor, std::vector<std::vector<int32_t>> pages) {
    service_.check_pages(pages);
    loans_.lend(right, debtor, std::move(pages));
  }
  bool end(uint64_t right, double seconds) { return loans_.end(right, span_of(seconds)); }
  int64_t reading() const { return loans_.reading(); }
  int64_t wrong() const { return service_.wrong(); }

  nb::bytes answer(int debtor, const nb::bytes& query) {
    const auto* at = reinterpret_cast<const uint8_t*>(query.c_str());
    const int64_t bytes = int64_t(query.size());
    std::vector<uint8_t> answer;
    {
      nb::gil_scoped_release release;
      int64_t room = 0;
      try {
        room = service_.answer_bytes(at, bytes);
      } catch (const std::invalid_argument&) {  // which the answer says
      }
      answer.resize(size_t(std::max<int64_t>(room, sizeof(AnswerHead))));
      answer.resize(size_t(service_.answer(debtor, at, bytes, answer.data(), int64_t(answer.size()))));
    }
    return nb::bytes(reinterpret_cast<const char*>(answer.data()), answer.size());
  }

 private:
  static const Backend& backend_of(const std::string& name) {
    const Backend* backend = backend_named(name.c_str());
    if (!backend) refuse("instruction_set: this processor has no " + name);
    return *backend;
  }

  static std::vector<ServedLayer> layers_of(const std::vector<ServedArgs>& layers) {
    std::vector<ServedLayer> served;
    for (const auto& [pages, rule, group] : layers) {
      const auto& [scale, softcap, window_tokens] = rule;
      served.push_back({layer_of(pages), {scale, softcap, window_tokens, 0, nullptr}, group});
    }
    return served;
  }

  Loans loans_;
  Service service_;
};

}  // namespace
}  // namespace kvell

NB_MODULE(_partials, m) {
  using namespace kvell;
  using release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Creditor>(m, "Creditor");
  nb::class_<CalledCreditor, Creditor>(m, "CalledCreditor")
      .def(nb::init<int64_t, nb::callable, nb::callable>(), "room_bytes"_a, "post"_a, "take"_a);
  nb::class_<Away>(m, "Away")
      .def(nb::init<std::vector<std::shared_ptr<Creditor>>, uint64_t>(), "creditors"_a, "number"_a)
      .def("expect",
           [](Away& self, const std::vector<AwayArgs>& runs, double patience_seconds) {
             std::vector<AwayRun> made;
             for (const auto& [group, request, creditor, first_section, rights] : runs)
               made.push_back({group, request, creditor, first_section, rights});
             self.expect(std::move(made), span_of(patience_seconds));
           },
           "runs"_a, "patience_seconds"_a)
      .def("missed", &Away::missed);
  nb::class_<Answering>(m, "Service")
      .def(nb::init<const std::string&, int, int32_t, const std::vector<ServedArgs>&,
                    const std::tuple<uintptr_t, int64_t>&>(),
           "instruction_set"_a, "element"_a, "heads"_a, "layers"_a, "words"_a)
      .def("lend", &Answering::lend, "right"_a, "debtor"_a, "pages"_a)
      .def("end", &Answering::end, "right"_a, "seconds"_a, release())
      .def("reading", &Answering::reading)
      .def("wrong", &Answering::wrong)
      .def("answer", &Answering::answer, "debtor"_a, "query"_a);
}
