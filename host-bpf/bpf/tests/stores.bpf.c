// SPDX-License-Identifier: GPL-2.0-only
/*
 * The reader of a guest's RAM that needs no thread of its own: each time that a
 * vCPU leaves its guest, its thread looks at the vCPU's register set_perf, where
 * the VMM has mapped it.
 *
 * Wrong when: the VMM's page table lacks the page. A look that fails is counted.
 * Late when: nothing takes the vCPU out of its guest.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

char LICENSE[] SEC("license") = "GPL";

struct watched {
	__u64 address;	/* of set_perf, in the VMM */
	__u64 looks;
	__u64 failed;	/* of these */
	__u32 khz;	/* of the last one */
	__u32 pad;
};

struct store {
	__u64 ns;	/* CLOCK_MONOTONIC */
	__u32 tid;
	__u32 khz;
};

/* By the vCPUs' threads. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 64);
	__type(key, __u32);
	__type(value, struct watched);
} vcpus SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 65536);
} stores SEC(".maps");

SEC("tp_btf/kvm_exit")
int BPF_PROG(read_store)
{
	struct store store = { .tid = bpf_get_current_pid_tgid() };
	struct watched *vcpu = bpf_map_lookup_elem(&vcpus, &store.tid);

	if (!vcpu)
		return 0;
	vcpu->looks++;
	if (bpf_probe_read_user(&store.khz, sizeof(store.khz), (void *)vcpu->address)) {
		vcpu->failed++;
		return 0;
	}
	if (store.khz == vcpu->khz)
		return 0;
	vcpu->khz = store.khz;
	store.ns = bpf_ktime_get_ns();
	bpf_ringbuf_output(&stores, &store, sizeof(store), 0);
	return 0;
}
