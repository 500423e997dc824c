// SPDX-License-Identifier: GPL-2.0-only
#define SECTION "fentry/kvm_smccc_call_handler"
#include "kfunc.h"
