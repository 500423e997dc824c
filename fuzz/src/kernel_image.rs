// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A file that is given as a guest's kernel: Image, Image.gz, EFI zboot, or anything else.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;

use nix::sys::memfd::{MFdFlags, memfd_create};
use vcpufreq_vm::image::KernelImage;

/// Opens it, and looks for its banner.
pub fn kernel_image(data: &[u8]) {
    let memory = memfd_create(c"fuzz", MFdFlags::MFD_CLOEXEC).expect("a file in memory");
    let mut memory = File::from(memory);
    memory.write_all(data).expect("room");
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    if let Ok(mut image) = KernelImage::open(path.as_ref()) {
        let _ = image.preempt_rt();
    }
}
