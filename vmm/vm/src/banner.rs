// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The facts in a kernel's banner, the line that begins its log
//! (Linux `init/version-timestamp.c`).

use std::io::{self, Read};

use memchr::memmem::Finder;

const START: &[u8] = b"Linux version ";
/// The word that `scripts/mkcompile_h` puts there for `CONFIG_PREEMPT_RT`.
const RT: &[u8] = b" PREEMPT_RT ";
/// Longest banner that is looked for, in bytes.
const LINE_MAX: usize = 1024;
const CHUNK: u64 = 1 << 20;

/// Whether an uncompressed kernel is a `PREEMPT_RT` one; `None` where no banner
/// shows it.
pub fn preempt_rt(mut image: impl Read) -> io::Result<Option<bool>> {
    let (start, rt) = (Finder::new(START), Finder::new(RT));
    let mut seen = Vec::new();
    loop {
        let more = image.by_ref().take(CHUNK).read_to_end(&mut seen)?;
        for at in start.find_iter(&seen) {
            let rest = &seen[at..seen.len().min(at + LINE_MAX)];
            // The format of /proc/version starts alike; it is another line.
            let line = rest.split(|byte| *byte == b'\n').next().unwrap_or(rest);
            if line.len() < rest.len() && !line.contains(&b'%') {
                return Ok(Some(rt.find(line).is_some()));
            }
        }
        if more == 0 {
            return Ok(None);
        }
        seen.drain(..seen.len().saturating_sub(LINE_MAX));
    }
}

#[cfg(test)]
mod tests {
    //! The banner is found wherever it lies, and what only looks like one isn't.

    use super::*;

    const STANDARD: &str = "Linux version 7.3.4 (a@b) (gcc) #1 SMP PREEMPT Debian 7.3.4-1\n";
    const REAL_TIME: &str = "Linux version 7.3.4 (a@b) (gcc) #1 SMP PREEMPT_RT Debian 7.3.4-1\n";

    fn at(place: usize, text: &str) -> Option<bool> {
        let mut image = vec![0; place];
        image.extend_from_slice(text.as_bytes());
        image.resize(image.len() + 3 * LINE_MAX, 0);
        preempt_rt(&image[..]).unwrap()
    }

    #[test]
    fn a_banner_tells_also_across_chunks() {
        let chunk = usize::try_from(CHUNK).unwrap();
        let around = chunk - REAL_TIME.len() - 2..chunk + 2;
        for place in around.chain([0, 5 * chunk - 3]) {
            assert_eq!(at(place, STANDARD), Some(false), "{place}");
            assert_eq!(at(place, REAL_TIME), Some(true), "{place}");
        }
    }

    #[test]
    fn what_is_no_banner_says_nothing() {
        assert_eq!(at(7, "Linux version %s (a@b) PREEMPT_RT \n"), None);
        assert_eq!(at(7, "Linux version without an end"), None);
        assert_eq!(at(7, ""), None);
        assert_eq!(preempt_rt(&b"Linux version 7.3"[..]).unwrap(), None);
    }
}
