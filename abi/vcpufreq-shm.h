/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * Virtual cpufreq in shared memory: the contract's second form. A guest finds
 * it as QEMU's ivshmem-doorbell: BAR 2 is the memory, BAR 0 has the doorbell.
 * Or it finds a device-tree node VCPUFREQ_SHM_COMPATIBLE: the first region is
 * the memory, the second one has the doorbell. Words are 32 bits,
 * little-endian, naturally aligned.
 *
 * The memory begins with a header page. Then comes a page per vCPU at stride
 * VCPUFREQ_STRIDE, with the registers of vcpufreq-abi.h at their offsets as
 * cells of memory: a read is a load. Without perftbl_sel and perftbl_rd; the
 * table is in the page. A request is a store to set_perf, then a write of
 * VCPUFREQ_SHM_RING(peer, vCPU) to the doorbell.
 *
 * A guest can write all of the memory. The server trusts none of it: it loads
 * set_perf, and only stores to the rest. Everything else is in
 * docs/registers.md.
 */
#ifndef VCPUFREQ_SHM_H
#define VCPUFREQ_SHM_H

#include "vcpufreq-abi.h"

#define VCPUFREQ_SHM_PCI_VENDOR		0x1af4
#define VCPUFREQ_SHM_PCI_DEVICE		0x1110
#define VCPUFREQ_SHM_COMPATIBLE		"vcpufreq,shm"
#define VCPUFREQ_SHM_BAR_REGS		0
#define VCPUFREQ_SHM_BAR_MEMORY		2

/* Offset in BAR 0, or the node's second region. */
#define VCPUFREQ_SHM_DOORBELL		0x0c	/* W  VCPUFREQ_SHM_RING() */
#define VCPUFREQ_SHM_RING(peer, vcpu)	((peer) << 16 | (vcpu))

/* Offsets in the header page, which the server fixes before a guest sees it. */
#define VCPUFREQ_SHM_MAGIC		0x00	/* R  VCPUFREQ_SHM_MAGIC_VALUE */
#define VCPUFREQ_SHM_VERSION		0x04	/* R  number: another one has another layout */
#define VCPUFREQ_SHM_FEATURES		0x08	/* R  bits: additions that a driver may ignore */
#define VCPUFREQ_SHM_VCPUS		0x0c	/* R  pages */
#define VCPUFREQ_SHM_SIZE		0x10	/* R  bytes: header and pages */
#define VCPUFREQ_SHM_PEER		0x14	/* R  number: the server's, for the doorbell */

#define VCPUFREQ_SHM_MAGIC_VALUE	0x71667076	/* "vpfq" */
#define VCPUFREQ_SHM_VERSION_VALUE	1
#define VCPUFREQ_SHM_PAGES		0x1000	/* bytes: where vCPU 0's page begins */

/* Offsets in a vCPU's page, beside those of the registers. */
#define VCPUFREQ_SHM_CAPACITY		0x104	/* R  of 1024: at the highest level; 0: unknown */
#define VCPUFREQ_SHM_PERFTBL		0x200	/* R  kHz: perftbl_len entries */
#define VCPUFREQ_SHM_POWER		0x300	/* R  microwatts: of each entry; 0: unknown */

/* cur_perf of a server that has ended: the guest knows nothing of its speed. */
#define VCPUFREQ_SHM_GONE		0xffffffff

#endif /* VCPUFREQ_SHM_H */
