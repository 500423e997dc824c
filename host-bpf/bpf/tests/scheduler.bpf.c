// SPDX-License-Identifier: GPL-2.0-only
/*
 * The least sched_ext schedulers there can be: the kernel's own defaults for
 * all that they would decide. One takes all fair tasks, one but those that ask
 * for it: the two differ in which of a CPU's servers are in force.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "GPL";

/* Of kernel/sched/ext. */
#define SCX_OPS_SWITCH_PARTIAL	0x8
/* More than the lab's hosts have, for the verifier. */
#define CPUS_MAX		64

struct task_struct;

/* What is set here; libbpf finds the members in the kernel by their names. */
struct sched_ext_ops {
	void (*tick)(struct task_struct *p);
	__s32 (*init)(void);
	__u64 flags;
	char name[128];
};

void scx_bpf_cpuperf_set(__s32 cpu, __u32 perf) __ksym;
__u32 scx_bpf_nr_cpu_ids(void)
	__ksym;

/* At first each CPU asks for its maximum, an idle one for its neighbours too. */
SEC("struct_ops/init")
int init(void *ctx)
{
	__u32 cpus = scx_bpf_nr_cpu_ids();

	for (__u32 cpu = 0; cpu < cpus && cpu < CPUS_MAX; cpu++)
		scx_bpf_cpuperf_set(cpu, 0);
	return 0;
}

/* Without this schedutil hears nothing of a busy CPU. */
SEC("struct_ops/tick")
void tick(void *ctx)
{
	scx_bpf_cpuperf_set(bpf_get_smp_processor_id(), 0);
}

SEC(".struct_ops.link")
struct sched_ext_ops takes_all = {
	.init = (void *)init,
	.tick = (void *)tick,
	.name = "takes_all",
};

SEC(".struct_ops.link")
struct sched_ext_ops takes_few = {
	.flags = SCX_OPS_SWITCH_PARTIAL,
	.name = "takes_few",
};
