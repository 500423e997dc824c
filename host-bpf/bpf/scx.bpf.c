// SPDX-License-Identifier: GPL-2.0-only
/*
 * The service of the actuator `scx`: a sched_ext scheduler that schedules
 * nothing, for the kernel to take targets, and programs that keep each CPU's
 * target the sum of its runnable vCPUs' parts (see scx.h).
 *
 * Cost: while any such scheduler is loaded, each switch of the host's takes
 * about 1 us more (emulated); sched_switch looks at two threads, and the
 * others at one.
 *
 * Wrong when: a vCPU's thread may run on several CPUs; its part comes with its
 * first switch there, not at the wake-up before.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

#include "kernel.h"
#include "scx.h"

char LICENSE[] SEC("license") = "GPL";

/* Of kernel/sched/ext and include/linux/sched.h. */
#define SCX_OPS_SWITCH_PARTIAL	0x8
#define TASK_DEAD		0x80

__u32 scx_bpf_nr_cpu_ids(void)
	__ksym;

/* libbpf finds the members in the kernel's structure by their names. */
struct sched_ext_ops {
	__s32 (*init)(void);
	void (*cpu_online)(__s32 cpu);
	void (*cpu_offline)(__s32 cpu);
	void (*exit)(struct scx_exit_info *info);
	__u64 flags;
	char name[128];
};

/* Until this has set them, targets are 1024. */
SEC("struct_ops.s/init")
__s32 BPF_PROG(vcpufreq_scx_init)
{
	__u32 cpus = scx_bpf_nr_cpu_ids(), cpu;

	if (!bpf_ksym_exists(scx_bpf_cpuperf_set))
		return -1;
	bpf_for(cpu, 0, cpus)
		scx_bpf_cpuperf_set(cpu, 0);
	return 0;
}

/* Without these two the kernel ends the scheduler at any hotplug. */
SEC("struct_ops.s/cpu_online")
void BPF_PROG(vcpufreq_scx_online, __s32 cpu)
{
	if (bpf_ksym_exists(scx_bpf_cpuperf_set))
		scx_bpf_cpuperf_set(cpu, 0);
}

SEC("struct_ops.s/cpu_offline")
void BPF_PROG(vcpufreq_scx_offline, __s32 cpu)
{
}

/* Also when the service is killed: VMs go back to clamps. */
SEC("struct_ops.s/exit")
void BPF_PROG(vcpufreq_scx_exit, struct scx_exit_info *info)
{
	struct vcpufreq_scx_control *control = scx_state();

	if (!control)
		return;
	control->exit_kind = info->kind;
	bpf_probe_read_kernel_str(control->exit_text, sizeof(control->exit_text), info->msg);
	if (!control->exit_text[0])
		bpf_probe_read_kernel_str(control->exit_text, sizeof(control->exit_text),
					  info->reason);
	__sync_lock_test_and_set(&control->state, VCPUFREQ_SCX_OFF);
}

SEC(".struct_ops.link")
struct sched_ext_ops vcpufreq = {
	.init = (void *)vcpufreq_scx_init,
	.cpu_online = (void *)vcpufreq_scx_online,
	.cpu_offline = (void *)vcpufreq_scx_offline,
	.exit = (void *)vcpufreq_scx_exit,
	.flags = SCX_OPS_SWITCH_PARTIAL,
	.name = "vcpufreq",
};

static __always_inline struct vcpufreq_scx_cpu *this_cpu(void)
{
	__u32 number = bpf_get_smp_processor_id();

	return bpf_map_lookup_elem(&scx_cpus, &number);
}

/* The run queue is locked: the sums alone. */
SEC("tp_btf/sched_switch")
int BPF_PROG(vcpufreq_scx_switch, bool preempt, struct task_struct *prev,
	     struct task_struct *next, unsigned int prev_state)
{
	struct vcpufreq_scx_vcpu *leaves = scx_vcpu_of(prev), *comes = scx_vcpu_of(next);
	__u32 here = bpf_get_smp_processor_id() + 1, from;
	struct vcpufreq_scx_cpu *cpu, *old;

	if (!leaves) {
		/* Or clang looks at both by one or, which pointers may not have. */
		barrier_var(comes);
		if (!comes)
			return 0;
	}
	cpu = this_cpu();
	if (!cpu)
		return 0;
	if (leaves && !preempt && prev_state) {
		scx_count(leaves, prev, 0);
		if (prev_state & TASK_DEAD)
			scx_leave(prev);
	}
	if (comes) {
		from = scx_count(comes, next, here);
		if (from && from != here) {
			__sync_lock_test_and_set(&cpu->left, from);
			from--;
			/* Should another one come first, its own next timer sees to it. */
			old = bpf_map_lookup_elem(&scx_cpus, &from);
			if (old)
				__sync_lock_test_and_set(&old->stale, 1);
		}
	}
	__sync_lock_test_and_set(&cpu->stale, 1);
	return 0;
}

static __always_inline void retarget_stale(void)
{
	struct vcpufreq_scx_cpu *cpu = this_cpu();
	__u32 left;

	if (!cpu || !READ_ONCE(cpu->stale))
		return;
	__sync_lock_test_and_set(&cpu->stale, 0);
	left = __sync_lock_test_and_set(&cpu->left, 0);
	if (left)
		scx_retarget(left - 1);
	scx_retarget(bpf_get_smp_processor_id());
}

/* The end of the switch, with nothing locked. */
SEC("tp_btf/sched_exit_tp")
int BPF_PROG(vcpufreq_scx_switched, bool is_switch)
{
	if (is_switch)
		retarget_stale();
	return 0;
}

/*
 * Before the thread is queued, with its own lock alone, where its CPU is known:
 * the wake-up has its target.
 */
SEC("tp_btf/sched_waking")
int BPF_PROG(vcpufreq_scx_waking, struct task_struct *p)
{
	struct vcpufreq_scx_vcpu *vcpu = scx_vcpu_of(p);
	__u32 number, from;

	if (!vcpu || p->nr_cpus_allowed != 1)
		return 0;
	number = p->thread_info.cpu;
	from = scx_count(vcpu, p, number + 1);
	if (from && from != number + 1)
		scx_retarget(from - 1);
	scx_retarget(number);
	return 0;
}

/* After a timer's function, the tick's among them: its utilization has changed. */
SEC("tp_btf/hrtimer_expire_exit")
int BPF_PROG(vcpufreq_scx_timer, struct hrtimer *timer)
{
	struct task_struct *p = bpf_get_current_task_btf();
	struct vcpufreq_scx_vcpu *vcpu = scx_vcpu_of(p);

	if (vcpu)
		scx_update(vcpu, p);
	retarget_stale();
	return 0;
}
