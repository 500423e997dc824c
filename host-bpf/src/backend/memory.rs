// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The C library's memory.
#![allow(unsafe_code, reason = "glibc's malloc_trim is C")]

/// Gives memory that was allocated and freed back to the host. glibc keeps what lies below
/// something that is still in use.
pub fn give_back_freed() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: it touches free memory only; what it returns is whether there was any.
        unsafe { libc::malloc_trim(0) };
    }
}
