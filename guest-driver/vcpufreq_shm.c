// SPDX-License-Identifier: GPL-2.0-only
/*
 * Memory that the host shares with the guest, whichever way it was found: its
 * header is read once and checked. Only guests can change it afterwards, and
 * nothing relies on it then.
 */

#include <linux/device.h>
#include <linux/err.h>
#include <linux/io.h>
#include <linux/limits.h>

#include "vcpufreq.h"

/**
 * struct vcpufreq_header - of the shared memory, at its offsets
 * @magic:	VCPUFREQ_SHM_MAGIC_VALUE, or the memory is another program's
 * @version:	of the layout
 * @vcpus:	pages after the header
 * @size:	bytes of header and pages
 * @peer:	the server's number at the doorbell
 */
struct vcpufreq_header {
	u32 magic;
	u32 version;
	u32 vcpus;
	u32 size;
	u32 peer;
};

static u32 vcpufreq_header_cell(const void *page, unsigned int offset)
{
	const __le32 *cell = page + offset;

	return le32_to_cpu(READ_ONCE(*cell));
}

static int vcpufreq_read_header(const struct resource *memory,
				struct vcpufreq_header *header)
{
	void *page;

	page = memremap(memory->start, VCPUFREQ_SHM_PAGES, MEMREMAP_WB);
	if (!page)
		return -ENOMEM;

	header->magic = vcpufreq_header_cell(page, VCPUFREQ_SHM_MAGIC);
	header->version = vcpufreq_header_cell(page, VCPUFREQ_SHM_VERSION);
	header->vcpus = vcpufreq_header_cell(page, VCPUFREQ_SHM_VCPUS);
	header->size = vcpufreq_header_cell(page, VCPUFREQ_SHM_SIZE);
	header->peer = vcpufreq_header_cell(page, VCPUFREQ_SHM_PEER);
	memunmap(page);

	return 0;
}

/* Whether the CPUs have enough pages is checked with their registers. */
static int vcpufreq_check_header(struct device *dev,
				 const struct resource *memory,
				 const struct vcpufreq_header *header)
{
	resource_size_t len = resource_size(memory);
	u64 need = VCPUFREQ_SHM_PAGES + (u64)header->vcpus * VCPUFREQ_STRIDE;

	if (header->version != VCPUFREQ_SHM_VERSION_VALUE)
		return dev_err_probe(dev, -EINVAL,
				     "the memory has layout %u, this driver knows layout %u\n",
				     header->version, VCPUFREQ_SHM_VERSION_VALUE);

	if (header->size > len)
		return dev_err_probe(dev, -EINVAL,
				     "the memory's header has %u bytes, the memory has %pap\n",
				     header->size, &len);

	if (need > header->size)
		return dev_err_probe(dev, -EINVAL,
				     "the memory's header has %u bytes, its %u vCPUs need %llu\n",
				     header->size, header->vcpus, need);

	if (header->peer > U16_MAX)
		return dev_err_probe(dev, -EINVAL,
				     "the memory's header has peer %u, above %u\n",
				     header->peer, U16_MAX);

	return 0;
}

/**
 * vcpufreq_map_shared() - check memory that may be the host's, and map it
 * @dev:	device that it was found through
 * @memory:	where it is
 * @io:		gets everything but the doorbell
 *
 * Return: 0; -ENODEV without a message when the memory is another program's;
 * another error, which was logged.
 */
int vcpufreq_map_shared(struct device *dev, const struct resource *memory,
			struct vcpufreq_io *io)
{
	struct vcpufreq_header header;
	void *mapped;
	int ret;

	if (resource_size(memory) < VCPUFREQ_SHM_PAGES)
		return -ENODEV;

	ret = vcpufreq_read_header(memory, &header);
	if (ret)
		return dev_err_probe(dev, ret, "cannot map the memory's header\n");

	if (header.magic != VCPUFREQ_SHM_MAGIC_VALUE)
		return -ENODEV;

	ret = vcpufreq_check_header(dev, memory, &header);
	if (ret)
		return ret;

	mapped = devm_memremap(dev, memory->start, header.size, MEMREMAP_WB);
	if (IS_ERR(mapped))
		return dev_err_probe(dev, PTR_ERR(mapped), "cannot map the memory\n");

	io->cells = mapped + VCPUFREQ_SHM_PAGES;
	io->size = (resource_size_t)header.vcpus * VCPUFREQ_STRIDE;
	io->peer = header.peer;

	return 0;
}
