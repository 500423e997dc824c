/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * A program that calls the module's function. Included with SECTION set: what
 * the module takes on one tracepoint, it has to refuse on another.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "GPL";

int vcpufreq_host_request(__u32 domain, __u32 vcpu, __u32 min, __u32 max,
			  __u64 since_ns) __ksym;

SEC(SECTION)
int caller(void *ctx)
{
	vcpufreq_host_request(0, 0, 0, 1024, 0);
	return 0;
}
