// SPDX-License-Identifier: GPL-2.0-only
#define SECTION "tp_btf/sched_switch"
#include "kfunc.h"
