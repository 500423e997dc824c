/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * What the BPF programs and the VMM share: the content of the maps.
 *
 * Fixed-width types, no padding that isn't named. src/layout.rs has the same
 * in Rust; the loader refuses an object whose maps have other sizes, and
 * VCPUFREQ_BPF_LAYOUT tells two versions of equal size apart.
 */
#ifndef VCPUFREQ_BPF_H
#define VCPUFREQ_BPF_H

#define VCPUFREQ_BPF_LAYOUT	14	/* raised with every change below */

#define VCPUFREQ_BPF_TABLE_MAX	64	/* entries of a vCPU's table */
#define VCPUFREQ_BPF_BUCKETS	32	/* of a histogram: bucket n has 2^n <= ns < 2^(n+1) */
#define VCPUFREQ_BPF_NAME	32	/* bytes of a policy's name, with zeros behind it */
#define VCPUFREQ_BPF_NO_CLAMP	0xffffffff	/* nothing in force, or not known */

/* A clamp is a number: uclamp.min in the low half, uclamp.max in the high. */
#define VCPUFREQ_BPF_CLAMP(min, max)	((min) | (max) << 16)

enum vcpufreq_bpf_clamp {
	VCPUFREQ_BPF_FLOOR,	/* uclamp.min */
	VCPUFREQ_BPF_EXACT,	/* uclamp.min and uclamp.max */
	VCPUFREQ_BPF_CEILINGS,	/* uclamp.min; both for a request that is a ceiling */
};

/* What a guest reads from cur_perf. */
enum vcpufreq_bpf_report {
	VCPUFREQ_BPF_REPORT_EXACT,	/* the frequency of the pCPU */
	VCPUFREQ_BPF_REPORT_TABLE,	/* the nearest entry of the vCPU's table */
	VCPUFREQ_BPF_REPORT_REQUEST,	/* what the domain asked for last */
};

/* What puts clamps into force. */
enum vcpufreq_bpf_actuator {
	VCPUFREQ_BPF_WORKER,	/* the VMM, after an event */
	VCPUFREQ_BPF_KFUNC,	/* the kernel module, before the guest goes on */
	VCPUFREQ_BPF_NO_ACTUATOR,	/* this host can't clamp: requests are counted */
	VCPUFREQ_BPF_SCX,	/* targets, before the guest goes on; see scx.h */
};

/* A pCPU. What changes is in dispatch.h. */
struct vcpufreq_bpf_cpu {
	__u32 capacity;		/* 0..1024 at reference_khz; 0: not known */
	__u32 reference_khz;
};

/* How a vCPU's requests are answered. */
struct vcpufreq_bpf_policy {
	__u32 perf_max_khz;	/* not 0 */
	__u32 reference_khz;	/* not 0 */
	__u32 capacity;		/* 1..1024 at reference_khz */
	__u32 limit;		/* the highest clamp that a request can be */
	__u32 headroom_num;	/* 4 of 5 before Linux 6.8, else 1 of 1 */
	__u32 headroom_den;
	__u32 clamp;		/* enum vcpufreq_bpf_clamp */
	__u32 report;		/* enum vcpufreq_bpf_report */
	__u32 actuator;		/* enum vcpufreq_bpf_actuator */
	__u32 domain;		/* number of the domain, counted from 0 */
	__u64 interval_ns;	/* between two that a vCPU writes, on average; 0: no limit */
	__u64 burst_ns;		/* requests may come ahead of that by this much */
	__u64 vm_interval_ns;	/* the same of all that the VM's vCPUs write */
	__u64 vm_burst_ns;
	__u32 table_len;
	__u8 tell;		/* 1: the VMM gets each request */
	__u8 sum;		/* 1: the neighbours' utilization is added */
	__u16 floor;		/* no clamp is below it, 0..1024 */
	__u32 table_khz[VCPUFREQ_BPF_TABLE_MAX];	/* rising */
};

/* A vCPU's register page, as far as the programs know it. */
struct vcpufreq_bpf_vcpu {
	__u64 latest;		/* count of requests << 32 | kHz of the last one */
	__u64 latest_ns;	/* when that was, CLOCK_MONOTONIC */
	__u64 due_ns;		/* of the limit: when its next write is due, of any register */
	__u64 moving_ns;	/* a clamp awaits its frequency since; 0: none does */
	__u32 cpu;		/* pCPU that its thread is or was on, plus 1; 0: none */
	__u32 deferred;		/* 1: the worker applies `latest` when it may */
	__u32 own_util;		/* of its thread, when it was last looked at, 0..1024 */
	__u32 others_util;	/* of what else ran on its pCPU then, as added to its clamp */
	__u64 woken_ns;		/* since when it runs after it has slept, while there is a policy */
	__u64 slept;		/* how often it had slept by then */

	__u64 requests;		/* writes of set_perf */
	__u64 reads;		/* that left the guest */
	__u64 in_kernel;	/* requests put into force by the module */
	__u64 to_worker;	/* left to the VMM */
	__u64 coalesced;	/* left to an event that was under way already */
	__u64 unchanged;	/* in force already */
	__u64 limited;		/* by the rate limit; the last one is deferred */
	__u64 refused;		/* by the module */
	__u64 not_applicable;	/* SCHED_DEADLINE, or a host without uclamp */
	__u64 dropped;		/* requests left to the VMM: no room for the event */
	__u64 unreported;		/* requests: no room to report them */
	__u64 switches;		/* its thread came onto a pCPU */
	__u64 frequencies;	/* changed while it ran */
	__u64 unsettled;	/* changed so fast that cur_perf was given up on */
	__u64 asked;		/* times that an operator's policy was asked */
	__u64 bounded;		/* of these, its answer was outside of the VM's limits */
	__u64 silent;		/* of these, no answer: the built-in rule's clamp counted */
	__u32 freq_after[VCPUFREQ_BPF_BUCKETS];	/* request to frequency, log2 ns */
};

struct vcpufreq_bpf_domain {
	__u32 clamp;		/* passed on last, or VCPUFREQ_BPF_NO_CLAMP */
	__u32 pending;		/* 1: an event is under way to the worker */
	__u32 granted_khz;	/* what was asked for last; 0: nothing */
	__u32 refresh;		/* 1: an event REFRESH is under way */
	/* What is added to the clamp, of the busiest pCPU: vCPU there plus 1, << 32 | 0..1024 */
	__u64 others;
	__u64 refreshed_ns;	/* when the last one was sent */
	__u64 ceiling_until;	/* when the ceiling ends, CLOCK_MONOTONIC; 0: none */
	__u32 bounds;		/* its clamps are kept within this one, by programs on the host */
	__u32 decided_by;	/* `policy` of the VM by which its clamp was decided last */
	__u64 decided_ns;	/* when that was, CLOCK_MONOTONIC; 0: it is to be again */
};

/* A VM. */
struct vcpufreq_bpf_vm {
	__u64 base;		/* guest address of the first page */
	__u32 vcpus;
	__u32 slot;		/* among the host's VMs, see dispatch.h */
	__u32 policy;		/* odd: an operator's, by number; even: none; 0: none yet */
	__u32 ended;		/* 1: the VMM takes the requests, and no policy decides */
	__u32 pad[10];		/* each event reads what is above */
	__u64 due_ns;		/* of the limit: when the next write of any vCPU is due */
	char policy_name[VCPUFREQ_BPF_NAME];	/* for people */
};

/* What an event is about. */
enum vcpufreq_bpf_kind {
	VCPUFREQ_BPF_APPLY,	/* the domain's clamp is to be put into force */
	VCPUFREQ_BPF_DEFERRED,	/* the vCPU's last request is, but not before `ns` */
	VCPUFREQ_BPF_HANDLED,	/* a request, and what became of it */
	VCPUFREQ_BPF_REFRESH,	/* `others` of the domain has changed */
	VCPUFREQ_BPF_FIRST_CEILING,	/* the domain's request is a ceiling too */
};

/* What became of a request. */
enum vcpufreq_bpf_outcome {
	VCPUFREQ_BPF_IN_KERNEL,		/* the module puts it into force */
	VCPUFREQ_BPF_IS_UNCHANGED,
	VCPUFREQ_BPF_IS_LIMITED,
	VCPUFREQ_BPF_LEFT_TO_WORKER,
	VCPUFREQ_BPF_IS_REFUSED,
	VCPUFREQ_BPF_IS_NOT_APPLICABLE,
};

/* To the worker. */
struct vcpufreq_bpf_event {
	__u32 vcpu;		/* whose register */
	__u32 domain;
	__u32 kind;		/* enum vcpufreq_bpf_kind */
	__u32 khz;		/* what was asked for; not for APPLY */
	__u64 ns;		/* CLOCK_MONOTONIC: not before, or when it was made */
	__u32 clamp;		/* of HANDLED only, as the next */
	__u32 outcome;		/* enum vcpufreq_bpf_outcome */
	__u32 writer;		/* vCPU that wrote it */
	__u32 pad;
};

/* What the programs of section syscall are run with. */
struct vcpufreq_bpf_call {
	__u32 vcpu;		/* a domain: vcpufreq_scx */
	__s32 tid;		/* vcpufreq_register_other alone */
};

#endif /* VCPUFREQ_BPF_H */
