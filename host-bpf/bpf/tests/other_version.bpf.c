// SPDX-License-Identifier: GPL-2.0-only
/* What VMMs find of a set of programs of another version. */
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "GPL";

struct slots {
	__u32 words[14 + 1024];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct slots);
} dispatch_slots SEC(".maps");

SEC("socket")
int dispatch_set(struct __sk_buff *skb)
{
	__u32 first = 0;

	return !!bpf_map_lookup_elem(&dispatch_slots, &first);
}
