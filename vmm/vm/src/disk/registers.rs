// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a virtio driver may read and write of the device's registers (virtio 1.3, 4.2.2), by offset.

use virtio_bindings::virtio_mmio as mmio;

/// What can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadRegister {
    Magic,
    Version,
    DeviceId,
    VendorId,
    DeviceFeatures,
    QueueSizeMax,
    QueueReady,
    InterruptStatus,
    Status,
    ConfigGeneration,
}

/// What can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteRegister {
    DeviceFeaturesSelect,
    DriverFeatures,
    DriverFeaturesSelect,
    QueueSelect,
    QueueSize,
    QueueReady,
    QueueNotify,
    InterruptAck,
    Status,
    DescTableLow,
    DescTableHigh,
    AvailRingLow,
    AvailRingHigh,
    UsedRingLow,
    UsedRingHigh,
}

impl ReadRegister {
    /// The register of four bytes at `offset`.
    pub fn decode(offset: u64) -> Option<Self> {
        Some(match u32::try_from(offset).ok()? {
            mmio::VIRTIO_MMIO_MAGIC_VALUE => Self::Magic,
            mmio::VIRTIO_MMIO_VERSION => Self::Version,
            mmio::VIRTIO_MMIO_DEVICE_ID => Self::DeviceId,
            mmio::VIRTIO_MMIO_VENDOR_ID => Self::VendorId,
            mmio::VIRTIO_MMIO_DEVICE_FEATURES => Self::DeviceFeatures,
            mmio::VIRTIO_MMIO_QUEUE_NUM_MAX => Self::QueueSizeMax,
            mmio::VIRTIO_MMIO_QUEUE_READY => Self::QueueReady,
            mmio::VIRTIO_MMIO_INTERRUPT_STATUS => Self::InterruptStatus,
            mmio::VIRTIO_MMIO_STATUS => Self::Status,
            mmio::VIRTIO_MMIO_CONFIG_GENERATION => Self::ConfigGeneration,
            _ => return None,
        })
    }
}

impl WriteRegister {
    /// The register of four bytes at `offset`.
    pub fn decode(offset: u64) -> Option<Self> {
        Some(match u32::try_from(offset).ok()? {
            mmio::VIRTIO_MMIO_DEVICE_FEATURES_SEL => Self::DeviceFeaturesSelect,
            mmio::VIRTIO_MMIO_DRIVER_FEATURES => Self::DriverFeatures,
            mmio::VIRTIO_MMIO_DRIVER_FEATURES_SEL => Self::DriverFeaturesSelect,
            mmio::VIRTIO_MMIO_QUEUE_SEL => Self::QueueSelect,
            mmio::VIRTIO_MMIO_QUEUE_NUM => Self::QueueSize,
            mmio::VIRTIO_MMIO_QUEUE_READY => Self::QueueReady,
            mmio::VIRTIO_MMIO_QUEUE_NOTIFY => Self::QueueNotify,
            mmio::VIRTIO_MMIO_INTERRUPT_ACK => Self::InterruptAck,
            mmio::VIRTIO_MMIO_STATUS => Self::Status,
            mmio::VIRTIO_MMIO_QUEUE_DESC_LOW => Self::DescTableLow,
            mmio::VIRTIO_MMIO_QUEUE_DESC_HIGH => Self::DescTableHigh,
            mmio::VIRTIO_MMIO_QUEUE_AVAIL_LOW => Self::AvailRingLow,
            mmio::VIRTIO_MMIO_QUEUE_AVAIL_HIGH => Self::AvailRingHigh,
            mmio::VIRTIO_MMIO_QUEUE_USED_LOW => Self::UsedRingLow,
            mmio::VIRTIO_MMIO_QUEUE_USED_HIGH => Self::UsedRingHigh,
            _ => return None,
        })
    }
}
