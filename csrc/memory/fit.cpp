#include "fit.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "hazard.h"

namespace kvell::memory {
namespace {

// The numbers of tests/oracle/eviction/hazard_fit.py.
constexpr int kPartial = 0, kRounds = 3;
constexpr double kShapeWeight = 50, kHintWeight = 5, kMost = 0.95, kLargestFactor = 8;
constexpr double kPriorReturns = 1e-3, kPriorEntries = 1, kTiny = 1e-12;

using Ages = std::array<double, kAges>;
using ByHint = std::array<Ages, kHints>;
using ByKind = std::array<ByHint, kKinds>;

void add(Ages& sum, const double* row) {
  for (int age = 0; age < kAges; ++age) sum[age] += row[age];
}

double total(const double* row) {
  double sum = 0;
  for (int age = 0; age < kAges; ++age) sum += row[age];
  return sum;
}

double product(const double* row, const Ages& other) {
  double sum = 0;
  for (int age = 0; age < kAges; ++age) sum += row[age] * other[age];
  return sum;
}

// Each age with its neighbours.
Ages smooth(const Ages& row) {
  Ages smoothed;
  for (int age = 0; age < kAges; ++age)
    smoothed[age] = row[std::max(age - 1, 0)] / 4 + row[age] / 2 + row[std::min(age + 1, kAges - 1)] / 4;
  return smoothed;
}

// Ratio of counted to expected, as far as it is beyond one standard error.
double believed(double counted, double expected, double events) {
  const double size = std::log((counted + 1e-6) / (expected + 1e-6));
  const double error = 1 / std::sqrt(std::max(events, 1e-9));
  const double kept = std::copysign(std::max(std::abs(size) - error, 0.0), size);
  return std::min(std::max(std::exp(kept), 1 / kLargestFactor), kLargestFactor);
}

class Fit {
 public:
  Fit(const double* entered, const double* returned, const double* events)
      : entered_(entered), returned_(returned), events_(events) {}

  std::vector<double> hazards() {
    by_hint();
    by_kind();
    factors();
    std::vector<double> found(size_t(kClasses) * kAges);
    each_class([&](int kind, int hint, int output) {
      const double factor = of_kind_[kind][hint], length = output_factor(kind, output);
      for (int age = 0; age < kAges; ++age)
        found[row(kind, hint, output) + age] = shapes_[kind][hint][age] * factor * length;
    });
    correct_outputs(found);
    for (double& chance : found) chance = std::min(chance, kMost);
    return found;
  }

 private:
  template <class Visit>
  static void each_class(const Visit& visit) {
    for (int kind = 0; kind < kKinds; ++kind)
      for (int hint = 0; hint < kHints; ++hint)
        for (int output = 0; output < kOutputs; ++output) visit(kind, hint, output);
  }
  static size_t row(int kind, int hint, int output) {
    return size_t(class_at(kind, hint, output)) * kAges;
  }
  double output_factor(int kind, int output) const {
    return kind == kPartial ? 1.0 : of_output_[output];
  }

  // _shapes_of_hints
  void by_hint() {
    Ages entries{}, returns{};
    ByHint own_entries{}, own_returns{};
    each_class([&](int kind, int hint, int output) {
      const size_t at = row(kind, hint, output);
      add(entries, entered_ + at);
      add(returns, returned_ + at);
      add(own_entries[hint], entered_ + at);
      add(own_returns[hint], returned_ + at);
    });
    entries = smooth(entries);
    returns = smooth(returns);
    for (int hint = 0; hint < kHints; ++hint) {
      const Ages entered = smooth(own_entries[hint]), returned = smooth(own_returns[hint]);
      for (int age = 0; age < kAges; ++age) {
        const double of_all =
            std::min((returns[age] + kPriorReturns) / (entries[age] + kPriorEntries), kMost);
        const double mixed = (returned[age] + kHintWeight * of_all) / (entered[age] + kHintWeight);
        shared_[hint][age] = std::min(mixed, kMost);
      }
    }
  }

  // _own_shapes
  void by_kind() {
    for (int kind = 0; kind < kKinds; ++kind)
      for (int hint = 0; hint < kHints; ++hint) {
        Ages entries{}, returns{};
        for (int output = 0; output < kOutputs; ++output) {
          add(entries, entered_ + row(kind, hint, output));
          add(returns, returned_ + row(kind, hint, output));
        }
        const double expected = product(entries.data(), shared_[hint]);
        const double ratio = std::max(total(returns.data()) / std::max(expected, kTiny), 1e-3);
        entries = smooth(entries);
        returns = smooth(returns);
        for (int age = 0; age < kAges; ++age) {
          const double mixed = returns[age] / ratio + kShapeWeight * shared_[hint][age];
          shapes_[kind][hint][age] = std::min(mixed / (entries[age] + kShapeWeight), kMost);
        }
      }
  }

  // _factors
  void factors() {
    std::array<double, kClasses> weights, counted;
    each_class([&](int kind, int hint, int output) {
      const int number = class_at(kind, hint, output);
      weights[number] = product(entered_ + row(kind, hint, output), shapes_[kind][hint]);
      counted[number] = total(returned_ + row(kind, hint, output));
    });
    of_output_.fill(1.0);
    for (int round = 0; round < kRounds; ++round) {
      std::array<double, kOutputs> expected{}, returns{}, events{};
      for (int kind = 0; kind < kKinds; ++kind)
        for (int hint = 0; hint < kHints; ++hint) {
          double of_kind = 0, returned = 0, happened = 0;
          for (int output = 0; output < kOutputs; ++output) {
            const int number = class_at(kind, hint, output);
            of_kind += weights[number] * output_factor(kind, output);
            returned += counted[number];
            happened += events_[number];
          }
          const double factor = believed(returned, of_kind, happened);
          of_kind_[kind][hint] = factor;
          if (kind == kPartial) continue;
          for (int output = 0; output < kOutputs; ++output) {
            const int number = class_at(kind, hint, output);
            expected[output] += weights[number] * factor;
            returns[output] += counted[number];
            events[output] += events_[number];
          }
        }
      for (int output = 0; output < kOutputs; ++output)
        of_output_[output] = believed(returns[output], expected[output], events[output]);
    }
  }

  // What is left, by output length and age.
  void correct_outputs(std::vector<double>& found) const {
    std::array<Ages, kOutputs> expected{}, counted{};
    const auto each_whole = [](const auto& visit) {
      each_class([&](int kind, int hint, int output) {
        if (kind != kPartial) visit(output, row(kind, hint, output));
      });
    };
    each_whole([&](int output, size_t at) {
      for (int age = 0; age < kAges; ++age) expected[output][age] += entered_[at + age] * found[at + age];
      add(counted[output], returned_ + at);
    });
    for (int output = 0; output < kOutputs; ++output) {
      expected[output] = smooth(expected[output]);
      counted[output] = smooth(counted[output]);
    }
    each_whole([&](int output, size_t at) {
      for (int age = 0; age < kAges; ++age)
        found[at + age] *=
            (counted[output][age] + kShapeWeight) / (expected[output][age] + kShapeWeight);
    });
  }

  const double *entered_, *returned_, *events_;
  ByHint shared_;
  ByKind shapes_;
  std::array<std::array<double, kHints>, kKinds> of_kind_;
  std::array<double, kOutputs> of_output_;
};

// index_of, for one class: what it returns is where its chances were.
void make_index(double* chances, const int64_t* bounds) {
  std::array<double, kAges + 1> alive, spent;
  alive[0] = 1;
  spent[0] = 0;
  for (int age = 0; age < kAges; ++age) {
    const double width = double(bounds[age + 1] - bounds[age]);
    alive[age + 1] = alive[age] * (1 - chances[age]);
    spent[age + 1] = spent[age] + alive[age] * width * (1 - chances[age] / 2);
  }
  double least = 0;
  for (int age = 0; age < kAges; ++age) {
    double best = 0;
    for (int until = age + 1; until <= kAges; ++until)
      best = std::max(best, (alive[age] - alive[until]) / std::max(spent[until] - spent[age], kTiny));
    least = age ? std::min(least, best) : best;
    chances[age] = least;
  }
}

}  // namespace

std::vector<double> fitted(const double* entered, const double* returned, const double* events,
                           const int64_t* bounds) {
  std::vector<double> values = Fit(entered, returned, events).hazards();
  for (int32_t number = 0; number < kClasses; ++number) make_index(&values[size_t(number) * kAges], bounds);
  return values;
}

}  // namespace kvell::memory
