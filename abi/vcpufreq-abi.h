/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * Virtual cpufreq: the register interface between a guest and its VMM.
 *
 * Compatible with the device-tree binding "qemu,virtual-cpufreq" (Linux 6.13
 * and later). One page per vCPU; registers are 32 bits, little-endian, and
 * accessed at their natural alignment. Everything else is in docs/registers.md.
 */
#ifndef VCPUFREQ_ABI_H
#define VCPUFREQ_ABI_H

#define VCPUFREQ_COMPATIBLE		"qemu,virtual-cpufreq"

/* Offsets in a vCPU's page. R, W: the guest reads, writes. */
#define VCPUFREQ_REG_CUR_PERF		0x00	/* R  kHz: what the vCPU gets now */
#define VCPUFREQ_REG_SET_PERF		0x04	/* W  kHz: what its policy asks for, 0: nothing */
#define VCPUFREQ_REG_PERFTBL_LEN	0x08	/* R  entries: 1 to 64, 1: no table */
#define VCPUFREQ_REG_PERFTBL_SEL	0x0c	/* W  index: the entry to read */
#define VCPUFREQ_REG_PERFTBL_RD		0x10	/* R  kHz: that entry, 0: there is none */
#define VCPUFREQ_REG_PERF_DOMAIN	0x14	/* R  number: equal in one policy */
#define VCPUFREQ_REG_EXTENSIONS		0x100	/* -  nothing is added below it */
#define VCPUFREQ_REG_FEATURES		0x100	/* R  bits: what there is beyond the binding */
#define VCPUFREQ_REG_PERF_CAP		0x108	/* R  kHz: the most that its domain can get now */
#define VCPUFREQ_REG_SHARED_PAGES	0x10c	/* W  page: where the guest reads; 0: none */

#define VCPUFREQ_FEATURE_ANY_CPU	0x1	/* bit: any CPU may write any set_perf */
#define VCPUFREQ_FEATURE_PERF_CAP	0x2	/* bit: perf_cap is known; it reads 0 without */
#define VCPUFREQ_FEATURE_CEILING	0x4	/* bit: set_perf takes ceilings */
#define VCPUFREQ_FEATURE_SHARED_PAGES	0x8	/* bit: shared_pages is there */

#define VCPUFREQ_SET_PERF_KHZ		0x0fffffff	/* bits of set_perf: the request, kHz */
#define VCPUFREQ_CEILING_SHIFT		28	/* bits above: a ceiling for so many ms */
#define VCPUFREQ_CEILING_MS_MAX		15

#define VCPUFREQ_SHARED_PAGE_SHIFT	12	/* bits: of a page of shared_pages */
#define VCPUFREQ_CUR_PERF_UNKNOWN	0xffffffff	/* kHz: of a shared page that isn't true */

#define VCPUFREQ_REG_WIDTH		4	/* bytes: of every register */
#define VCPUFREQ_STRIDE			0x1000	/* bytes: from one vCPU's page to the next */
#define VCPUFREQ_REGION_ALIGN		0x10000	/* bytes: the region is aligned and padded to it */
#define VCPUFREQ_PERFTBL_MAX		64	/* entries: of a table, at most */
#define VCPUFREQ_VCPUS_MAX		512	/* vCPUs: of a device, at most */

#endif /* VCPUFREQ_ABI_H */
