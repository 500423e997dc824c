// SPDX-License-Identifier: GPL-2.0-only
/* A loop of 8 million turns, which the verifier takes. */
#include <stddef.h>
#include "vcpufreq_policy.h"

static long turn(__u32 number, void *context)
{
	return 0;
}

VCPUFREQ_POLICY(slow)
{
	bpf_loop(1 << 23, turn, NULL, 0);
}
