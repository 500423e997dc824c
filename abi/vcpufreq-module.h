/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * What a VMM and the module vcpufreq_host agree on.
 *
 * A VMM opens the device, sets how many vCPUs and domains its VM has, and
 * binds each domain to what is clamped for it. From then on BPF programs on
 * the tracepoint kvm_mmio can call vcpufreq_host_request() in the VMM's
 * threads. All of it ends when the file is closed.
 */
#ifndef VCPUFREQ_MODULE_H
#define VCPUFREQ_MODULE_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define VCPUFREQ_HOST_DEVICE	"/dev/vcpufreq_host"
#define VCPUFREQ_HOST_BUCKETS	32	/* bucket n has 2^n <= ns < 2^(n+1) */

struct vcpufreq_host_vm {
	__u32 vcpus;		/* 1 to 512 */
	__u32 domains;		/* 1 to vcpus */
};

/* A domain is clamped by two files of a cgroup, open for writing. */
struct vcpufreq_host_bind {
	__u32 domain;
	__s32 min_fd;		/* cpu.uclamp.min */
	__s32 max_fd;		/* cpu.uclamp.max */
};

/* For what the VMM itself has to put into force: one writer has the last word. */
struct vcpufreq_host_apply {
	__u32 domain;
	__u32 min;		/* 0 to max */
	__u32 max;		/* to 1024 */
	__u32 flags;		/* VCPUFREQ_HOST_UNCOUNTED, or 0 */
};

/* No request: vcpufreq_host_stats has none of it. */
#define VCPUFREQ_HOST_UNCOUNTED	1

struct vcpufreq_host_stats {
	__u32 domain;		/* asked for */
	__s32 last_error;	/* of a refusal; 0: none yet */
	__u64 applied;
	__u64 refused;
	__u32 after_ns[VCPUFREQ_HOST_BUCKETS];	/* request to clamp in force */
};

#define VCPUFREQ_HOST_VM	_IOW(0xcf, 0x00, struct vcpufreq_host_vm)
#define VCPUFREQ_HOST_BIND	_IOW(0xcf, 0x01, struct vcpufreq_host_bind)
#define VCPUFREQ_HOST_APPLY	_IOW(0xcf, 0x02, struct vcpufreq_host_apply)
#define VCPUFREQ_HOST_STATS	_IOWR(0xcf, 0x03, struct vcpufreq_host_stats)

#endif /* VCPUFREQ_MODULE_H */
