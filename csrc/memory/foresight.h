// When a holder has to be looked at again: its room, and its next event.
#pragma once
#include "holders.h"

namespace kvell::memory {

void foresee(const Groups& groups, Holder& holder);

}  // namespace kvell::memory
