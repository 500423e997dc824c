// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The text of a file that gzip made (RFC 1952), as the kernel has its configuration.

/// More than any kernel's configuration, whose text is some 300 KiB.
const MAX: usize = 16 << 20;
const MAGIC: [u8; 3] = [0x1f, 0x8b, 8];
const HEADER: usize = 10;
/// Flags of fields between the header and the data: the kernel's build leaves all of them out.
const MORE: u8 = 0b1_1110;

/// The text; `None` when it isn't such a file.
pub(crate) fn text(bytes: &[u8]) -> Option<String> {
    let header = bytes.get(..HEADER)?;
    if header[..3] != MAGIC || header[3] & MORE != 0 {
        return None;
    }
    let text = miniz_oxide::inflate::decompress_to_vec_with_limit(&bytes[HEADER..], MAX).ok()?;
    String::from_utf8(text).ok()
}

#[cfg(test)]
mod tests {
    //! Promise: what gzip made comes out, and anything else is none of it.
    use super::*;

    #[test]
    fn what_gzip_made() {
        // printf 'A=y\\n' | gzip -n
        let bytes = [
            0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x03, 0x73, 0xb4, 0xad, 0xe4,
            0x02, 0x00, 0x26, 0xbd, 0x77, 0x30, 0x04, 0x00, 0x00, 0x00,
        ];
        assert_eq!(text(&bytes).as_deref(), Some("A=y\n"));
        for cut in 0..bytes.len() - 9 {
            assert_eq!(text(&bytes[..cut]), None, "{cut}");
        }
        assert_eq!(text(b"CONFIG_A=y and so on"), None);
    }
}
