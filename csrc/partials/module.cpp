// The Python face of what asks others for sections, and of what answers. A pass in Python calls `Away`
// itself, layer by layer; the compiled one (csrc/forward) is given it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
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

using ServedArgs = std::tuple<LayerArgs, int>;  // pages, and their group
using AwayArgs = std::tuple<int32_t, int32_t, int32_t, int32_t, std::vector<uint64_t>>;
using AwayGroupArgs = std::tuple<BatchArgs, int32_t>;  // and the tokens of its pages
using ShapeArgs = std::tuple<int32_t, int32_t, int32_t, int>;  // heads, sizes of key and value, element
using AwayLayerArgs = std::tuple<int, int, ShapeArgs, float, float, uintptr_t>;  // as AwayLayer

std::chrono::nanoseconds span_of(double seconds) {
  if (!(seconds >= 0) || seconds > 1e6) refuse("seconds: from 0 to a million");
  return std::chrono::nanoseconds(int64_t(seconds * 1e9));
}

AwayLayer away_layer(const AwayLayerArgs& args) {
  const auto& [number, group, shape, scale, softcap, query] = args;
  const auto& [heads, head_size, value_size, element] = shape;
  return {number, group, {heads, head_size, value_size, static_cast<Element>(element)}, scale, softcap,
          at<const void>(query)};
}

// A layer's records as they lie in `away`: [rows, heads, 2 + value_size], and where each request's begin.
nb::tuple layer_records(nb::handle_t<Away> self, const AwayLayerArgs& args) {
  Away& away = nb::cast<Away&>(self);
  const AwayLayer layer = away_layer(args);
  const Records records = away.records(layer.number, layer.group);
  std::vector<int32_t>& starts = away.starts(layer.group);
  const size_t rows = size_t(starts.back()), heads = size_t(layer.shape.heads);
  const size_t numbers = size_t(2 + layer.shape.value_size);
  return nb::make_tuple(
      nb::ndarray<nb::numpy, float, nb::ndim<3>>(records.values, {rows, heads, numbers}, self),
      nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>(starts.data(), {starts.size()}, self));
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
  Answering(const std::string& instruction_set, const std::vector<ServedArgs>& layers,
            const std::tuple<uintptr_t, int64_t>& words)
      : loans_(at<const uint64_t>(std::get<0>(words)), std::get<1>(words)),
        service_(backend_of(instruction_set), layers_of(layers), loans_) {}

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
    for (const auto& [pages, group] : layers) served.push_back({layer_of(pages), group});
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
      .def("missed", &Away::missed)
      .def("begin",
           [](Away& self, const std::vector<AwayGroupArgs>& groups) {
             std::vector<AwayGroup> made;
             for (const auto& [batch, page_tokens] : groups) made.push_back({batch_of(batch), page_tokens, true});
             self.begin(made);
           },
           "groups"_a)
      .def("reads", &Away::reads, "group"_a)
      .def("post", [](Away& self, const AwayLayerArgs& layer) { self.post(away_layer(layer)); }, "layer"_a)
      .def("wait", [](Away& self, const AwayLayerArgs& layer) { self.wait(away_layer(layer)); }, "layer"_a)
      .def("records", &layer_records, "layer"_a);
  nb::class_<Answering>(m, "Service")
      .def(nb::init<const std::string&, const std::vector<ServedArgs>&,
                    const std::tuple<uintptr_t, int64_t>&>(),
           "instruction_set"_a, "layers"_a, "words"_a)
      .def("lend", &Answering::lend, "right"_a, "debtor"_a, "pages"_a)
      .def("end", &Answering::end, "right"_a, "seconds"_a, release())
      .def("reading", &Answering::reading)
      .def("wrong", &Answering::wrong)
      .def("answer", &Answering::answer, "debtor"_a, "query"_a);
}
