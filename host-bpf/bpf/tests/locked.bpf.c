// SPDX-License-Identifier: GPL-2.0-only
/*
 * What the service has to refuse: with the run queue locked, this would hang
 * the host at its first switch. The verifier takes it.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "GPL";

void scx_bpf_cpuperf_set(__s32 cpu, __u32 perf) __ksym;

SEC("tp_btf/sched_switch")
int locked(void *ctx)
{
	scx_bpf_cpuperf_set(0, 0);
	return 0;
}
