// SPDX-License-Identifier: GPL-2.0-only
#define SECTION "fentry/schedule"
#include "kfunc.h"
