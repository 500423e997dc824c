// SPDX-License-Identifier: GPL-2.0-only
/*
 * What any program of the host's can do: a target above the highest, for which
 * the kernel ends the scheduler that is loaded.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "GPL";

#define TOO_MUCH	1025

void scx_bpf_cpuperf_set(__s32 cpu, __u32 perf) __ksym;

SEC("syscall")
int target(void *ctx)
{
	scx_bpf_cpuperf_set(0, TOO_MUCH);
	return 0;
}
