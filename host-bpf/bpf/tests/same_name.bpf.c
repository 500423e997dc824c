// SPDX-License-Identifier: GPL-2.0-only
/* A BPF function with the name of the kernel's: another target for fentry. */
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "GPL";

SEC("tc")
int kvm_smccc_call_handler(struct __sk_buff *skb)
{
	return 0;
}
