// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Allocations that fail inside a system call, where the kernel has CONFIG_FAULT_INJECTION
//! (Documentation/fault-injection/fault-injection.rst).

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::{Context, Result};

use crate::harness::sysfs;

/// Which of its allocations from now on fails for a thread; 0: none. It counts down.
const FAIL_NTH: &str = "/proc/thread-self/fail-nth";

/// Whether the kernel can have them.
pub fn exist() -> bool {
    Path::new(FAIL_NTH).exists()
}

/// Has allocations that may sleep fail too, and says nothing of each.
pub fn prepare() -> Result<()> {
    if !exist() {
        return Ok(());
    }
    for kind in ["failslab", "fail_page_alloc"] {
        let set = |name: &str, value: &str| {
            sysfs::write(format!("/sys/kernel/debug/{kind}/{name}"), value)
        };
        set("ignore-gfp-wait", "N")?;
        set("verbose", "0")?;
    }
    sysfs::write("/sys/kernel/debug/fail_page_alloc/min-order", "0")
}

/// Faults of one thread, which must be the one that asks for them.
pub struct Faults(Option<File>);

impl Faults {
    /// Of the calling thread; none on a kernel without.
    pub fn of_this_thread() -> Result<Self> {
        let open = || File::options().read(true).write(true).open(FAIL_NTH);
        Ok(Self(exist().then(open).transpose().context(FAIL_NTH)?))
    }

    /// Carries `call` out with its `nth` allocation failing, from 1; and whether it had so many.
    pub fn during<T>(&self, nth: u32, call: impl FnOnce() -> T) -> Result<(T, bool)> {
        let Some(file) = &self.0 else {
            return Ok((call(), false));
        };
        file.write_at(nth.to_string().as_bytes(), 0)?;
        let result = call();
        let mut left = [0_u8; 16];
        let length = file.read_at(&mut left, 0)?;
        file.write_at(b"0", 0)?;
        Ok((result, left[..length].starts_with(b"0")))
    }
}
