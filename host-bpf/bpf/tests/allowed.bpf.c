// SPDX-License-Identifier: GPL-2.0-only
#define SECTION "tp_btf/kvm_mmio"
#include "kfunc.h"
