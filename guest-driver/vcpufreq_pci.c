// SPDX-License-Identifier: GPL-2.0-only
/*
 * Attaches the driver to QEMU's ivshmem-doorbell, whose other end is a server
 * of virtual cpufreq: BAR 2 has the registers as memory, BAR 0 the doorbell.
 *
 * The PCI id is that of any ivshmem, so the magic in the memory decides.
 */

#include <linux/err.h>
#include <linux/mod_devicetable.h>
#include <linux/module.h>
#include <linux/pci.h>

#include "vcpufreq.h"

static bool vcpufreq_is_memory(struct pci_dev *pdev, int bar,
			       resource_size_t size)
{
	return (pci_resource_flags(pdev, bar) & IORESOURCE_MEM) &&
	       pci_resource_len(pdev, bar) >= size;
}

static int vcpufreq_map_doorbell(struct pci_dev *pdev, struct vcpufreq_io *io)
{
	void __iomem *regs;

	if (!vcpufreq_is_memory(pdev, VCPUFREQ_SHM_BAR_REGS,
				VCPUFREQ_SHM_DOORBELL + VCPUFREQ_REG_WIDTH))
		return dev_err_probe(&pdev->dev, -EINVAL,
				     "BAR %d has no doorbell\n",
				     VCPUFREQ_SHM_BAR_REGS);

	regs = pcim_iomap_region(pdev, VCPUFREQ_SHM_BAR_REGS, pci_name(pdev));
	if (IS_ERR(regs))
		return dev_err_probe(&pdev->dev, PTR_ERR(regs),
				     "cannot map BAR %d\n",
				     VCPUFREQ_SHM_BAR_REGS);

	io->doorbell = regs + VCPUFREQ_SHM_DOORBELL;

	return 0;
}

static int vcpufreq_pci_probe(struct pci_dev *pdev,
			      const struct pci_device_id *id)
{
	struct vcpufreq_io io = {};
	struct vcpufreq *vf;
	int ret;

	/* Another program's ivshmem is not an error, and not worth a word. */
	if (!vcpufreq_is_memory(pdev, VCPUFREQ_SHM_BAR_MEMORY,
				VCPUFREQ_SHM_PAGES))
		return -ENODEV;

	ret = pcim_enable_device(pdev);
	if (ret)
		return ret;

	ret = vcpufreq_map_shared(&pdev->dev,
				  pci_resource_n(pdev, VCPUFREQ_SHM_BAR_MEMORY),
				  &io);
	if (ret)
		return ret;

	ret = pcim_request_region(pdev, VCPUFREQ_SHM_BAR_MEMORY, pci_name(pdev));
	if (ret)
		return dev_err_probe(&pdev->dev, ret, "BAR %d is in use\n",
				     VCPUFREQ_SHM_BAR_MEMORY);

	ret = vcpufreq_map_doorbell(pdev, &io);
	if (ret)
		return ret;

	vf = vcpufreq_register(&pdev->dev, &io);
	if (IS_ERR(vf))
		return PTR_ERR(vf);

	pci_set_drvdata(pdev, vf);

	return 0;
}

static void vcpufreq_pci_remove(struct pci_dev *pdev)
{
	vcpufreq_unregister(pci_get_drvdata(pdev));
}

static const struct pci_device_id vcpufreq_pci_ids[] = {
	{ PCI_DEVICE(VCPUFREQ_SHM_PCI_VENDOR, VCPUFREQ_SHM_PCI_DEVICE) },
	{ }
};
MODULE_DEVICE_TABLE(pci, vcpufreq_pci_ids);

struct pci_driver vcpufreq_pci_driver = {
	.name = "vcpufreq-guest",
	.id_table = vcpufreq_pci_ids,
	.probe = vcpufreq_pci_probe,
	.remove = vcpufreq_pci_remove,
};
