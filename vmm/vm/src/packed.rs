// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Packed kernels: `Image.gz`, `Image.zst`, and the EFI zboot image of either
//! (Linux `drivers/firmware/efi/libstub/zboot-header.S`).
//!
//! The first bytes of a file tell where its payload is. [`Payload::unpack`] writes at most
//! [`UNPACKED_MAX`] bytes, whatever the payload is made of. What comes out is judged by
//! `image_header`, as the file of an unpacked kernel is.

use std::io::{self, Read, Seek, SeekFrom, Write};

use anyhow::{Context, anyhow, bail, ensure};
use miniz_oxide::inflate::stream::{InflateState, inflate};
use miniz_oxide::{DataFormat, MZError, MZFlush, MZStatus};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// Most bytes that a kernel is unpacked to: a kernel with all its debug checks takes 100 MiB.
pub const UNPACKED_MAX: u64 = 512 << 20;

const CHUNK: usize = 1 << 18;
/// Where a zboot header has what, in bytes.
const ZBOOT_MAGIC_AT: usize = 4;
const ZBOOT_OFFSET_AT: usize = 8;
const ZBOOT_LEN_AT: usize = 12;
const ZBOOT_TYPE_AT: usize = 24;
const ZBOOT_TYPE_LEN: usize = 32;
const ZBOOT_LEN: u64 = 64;

/// What a payload is packed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    /// RFC 1952.
    Gzip,
    /// RFC 8878.
    Zstd,
}

/// How formats begin: the name, the first bytes, the command that unpacks it.
const FORMATS: [(&str, &[u8], &str); 7] = [
    ("gzip", b"\x1f\x8b", "gzip -dc"),
    ("zstd", b"\x28\xb5\x2f\xfd", "zstd -dc"),
    ("xz", b"\xfd7zXZ\0", "xz -dc"),
    ("lzma", b"\x5d\0\0", "xz --format=lzma -dc"),
    ("lz4", b"\x02\x21\x4c\x18", "lz4 -dc"),
    ("lzo", b"\x89LZO", "lzop -dc"),
    ("bzip2", b"BZh", "bzip2 -dc"),
];

/// The packed kernel in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload {
    at: u64,
    len: u64,
    codec: Codec,
}

impl Payload {
    /// Finds the payload by the first bytes of a file of `file_len` bytes; `None` in a file that
    /// isn't packed.
    ///
    /// # Errors
    /// Why it can't be unpacked: the cause, then what to do.
    pub fn find(head: &[u8], file_len: u64) -> anyhow::Result<Option<Self>> {
        if head.starts_with(b"MZ") && head.get(ZBOOT_MAGIC_AT..8) == Some(b"zimg") {
            return Self::in_zboot(head, file_len).map(Some);
        }
        let format = FORMATS.iter().find(|(_, start, _)| head.starts_with(start));
        let Some((name, _, command)) = format else {
            return Ok(None);
        };
        let codec = codec(name)
            .with_context(|| format!("is packed with {name}; unpack it: {command} FILE > Image"))?;
        let (at, len) = (0, file_len);
        Ok(Some(Self { at, len, codec }))
    }

    fn in_zboot(head: &[u8], file_len: u64) -> anyhow::Result<Self> {
        check_len(file_len, head.len() as u64, ZBOOT_LEN)?;
        let (at, len) = (le32(head, ZBOOT_OFFSET_AT), le32(head, ZBOOT_LEN_AT));
        ensure!(
            at >= ZBOOT_LEN && len > 0,
            "is damaged: its zboot header names {len} bytes at {at}; copy it again"
        );
        check_len(file_len, file_len, at + len)?;
        let text = &head[ZBOOT_TYPE_AT..][..ZBOOT_TYPE_LEN];
        let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
        // Linux names its recipe: zstd22, xzkern.
        let format = FORMATS
            .iter()
            .find(|(name, ..)| text.starts_with(name.as_bytes()));
        let Some((name, _, command)) = format else {
            let text = text.escape_ascii();
            bail!(
                "is an EFI zboot image of an unknown compression ({text}); give arch/arm64/boot/Image of the same build"
            );
        };
        let codec = codec(name).with_context(|| {
            let from = at + 1;
            format!("is an EFI zboot image with {name}; unpack it: tail -c +{from} FILE | head -c {len} | {command} > Image")
        })?;
        Ok(Self { at, len, codec })
    }

    /// Writes the unpacked kernel to `to`; returns its length.
    ///
    /// # Errors
    /// What is wrong with the payload, or with reading and writing.
    pub fn unpack(&self, file: &mut (impl Read + Seek), to: impl Write) -> anyhow::Result<u64> {
        ensure!(
            self.len <= UNPACKED_MAX,
            "has {} packed bytes, more than the {UNPACKED_MAX} of any kernel; check the path",
            self.len
        );
        file.seek(SeekFrom::Start(self.at))?;
        let mut packed = Vec::new();
        file.take(self.len).read_to_end(&mut packed)?;
        let mut sink = Sink::new(to, UNPACKED_MAX);
        match self.codec {
            Codec::Gzip => gunzip(&packed, &mut sink)?,
            Codec::Zstd => unzstd(&packed, &mut sink)?,
        }
        Ok(sink.len)
    }
}

fn codec(name: &str) -> Option<Codec> {
    match name {
        "gzip" => Some(Codec::Gzip),
        "zstd" => Some(Codec::Zstd),
        _ => None,
    }
}

fn check_len(file_len: u64, have: u64, need: u64) -> anyhow::Result<()> {
    ensure!(
        have >= need,
        "is truncated: it has {file_len} bytes of at least {need}; copy it again"
    );
    Ok(())
}

/// 0 beyond the end.
fn le32(head: &[u8], at: usize) -> u64 {
    let bytes = head.get(at..).and_then(|rest| rest.first_chunk());
    u64::from(bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes)))
}

fn truncated() -> anyhow::Error {
    anyhow!("is truncated: its packed data ends early; copy it again")
}

fn damaged() -> anyhow::Error {
    anyhow!("is damaged: its packed data can't be unpacked; copy it again")
}

/// Takes what is unpacked, and no more than a kernel can have.
struct Sink<W> {
    to: W,
    len: u64,
    max: u64,
    crc: u32,
}

impl<W: Write> Sink<W> {
    fn new(to: W, max: u64) -> Self {
        let (len, crc) = (0, !0);
        Self { to, len, max, crc }
    }
}

impl<W: Write> Write for Sink<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.len += bytes.len() as u64;
        if self.len > self.max {
            let why = format!(
                "unpacks to more than the {} bytes of any kernel; check the path",
                self.max
            );
            return Err(io::Error::other(why));
        }
        self.to.write_all(bytes)?;
        self.crc = bytes.iter().fold(self.crc, |crc, byte| {
            CRC[usize::from(byte ^ crc.to_le_bytes()[0])] ^ (crc >> 8)
        });
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// CRC-32 of each byte, as RFC 1952 has it.
const CRC: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte: u32 = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte, 0);
        while bit < 8 {
            crc = (crc >> 1) ^ (0xedb8_8320 * (crc & 1));
            bit += 1;
        }
        table[byte as usize] = crc;
        byte += 1;
    }
    table
};

/// What follows the first member is no part of the kernel: Android appends device trees.
fn gunzip(packed: &[u8], sink: &mut Sink<impl Write>) -> anyhow::Result<()> {
    let mut rest = deflated(packed).ok_or_else(truncated)?;
    let mut state = InflateState::new_boxed(DataFormat::Raw);
    let mut chunk = vec![0; CHUNK];
    loop {
        let step = inflate(&mut state, rest, &mut chunk, MZFlush::None);
        rest = &rest[step.bytes_consumed..];
        sink.write_all(&chunk[..step.bytes_written])?;
        match step.status {
            Ok(MZStatus::StreamEnd) => break,
            Ok(_) if step.bytes_consumed + step.bytes_written > 0 => {}
            Ok(_) | Err(MZError::Buf) => return Err(truncated()),
            Err(_) => return Err(damaged()),
        }
    }
    let trailer = rest.first_chunk::<8>().ok_or_else(truncated)?;
    match le32(trailer, 0) == u64::from(!sink.crc) && le32(trailer, 4) == sink.len & 0xffff_ffff {
        true => Ok(()),
        false => Err(damaged()),
    }
}

/// What follows a gzip header; `None` where it is cut.
fn deflated(packed: &[u8]) -> Option<&[u8]> {
    const CHECKSUM: u8 = 2;
    const EXTRA: u8 = 4;
    const NAME: u8 = 8;
    const COMMENT: u8 = 16;
    let flags = *packed.get(3)?;
    let mut rest = packed.get(10..)?;
    if flags & EXTRA != 0 {
        let len = u16::from_le_bytes(*rest.first_chunk()?);
        rest = rest.get(2 + usize::from(len)..)?;
    }
    for text in [NAME, COMMENT] {
        if flags & text != 0 {
            let end = rest.iter().position(|byte| *byte == 0)?;
            rest = &rest[end + 1..];
        }
    }
    match flags & CHECKSUM {
        0 => Some(rest),
        _ => rest.get(2..),
    }
}

fn unzstd(packed: &[u8], sink: &mut Sink<impl Write>) -> anyhow::Result<()> {
    let mut rest = packed;
    let mut frame = FrameDecoder::new();
    // A window larger than 128 MiB, the most of `zstd --ultra -22`, is refused.
    frame.reset(&mut rest).map_err(|_| damaged())?;
    while !frame.is_finished() {
        let step = BlockDecodingStrategy::UptoBytes(CHUNK);
        let decoded = frame.decode_blocks(&mut rest, step);
        if decoded.is_err() {
            return Err(if rest.is_empty() {
                truncated()
            } else {
                damaged()
            });
        }
        frame.collect_to_writer(&mut *sink)?;
    }
    frame.collect_to_writer(&mut *sink)?;
    let told = frame.get_checksum_from_data();
    match told.is_none() || told == frame.get_calculated_checksum() {
        true => Ok(()),
        false => Err(damaged()),
    }
}

#[cfg(test)]
mod tests {
    //! Each way of packing a kernel boots the kernel; each other file has its own line; no bytes
    //! make a panic.

    use miniz_oxide::deflate::compress_to_vec;
    use proptest::prelude::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec as zstd};

    use super::super::image::KernelImage;
    use super::*;
    use crate::fakes::{FILE_LEN, image};

    /// An Image of [`FILE_LEN`] bytes that takes 1 MiB in memory.
    fn plain() -> Vec<u8> {
        let mut bytes = image(1 << 20);
        // Beyond the headers, and compressible only in part.
        bytes.extend(
            (0..usize::try_from(FILE_LEN).unwrap() - bytes.len())
                .map(|n| (n * n % 251).to_le_bytes()[0]),
        );
        bytes
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        // With a name and a checksum of the header, as few files have.
        let header = b"\x1f\x8b\x08\x0a\0\0\0\0\0\x03Image\0\0\0";
        let mut sink = Sink::new(io::sink(), u64::MAX);
        sink.write_all(bytes).unwrap();
        let trailer = [
            (!sink.crc).to_le_bytes(),
            u32::try_from(sink.len).unwrap().to_le_bytes(),
        ]
        .concat();
        [&header[..], &compress_to_vec(bytes, 6), &trailer].concat()
    }

    /// What `zstd --ultra -22` makes of its standard input: a window of 128 MiB, no size.
    fn zstd22(bytes: &[u8]) -> Vec<u8> {
        let header = b"\x28\xb5\x2f\xfd\0\x88";
        let block = (u32::try_from(bytes.len()).unwrap() << 3) | 1;
        [&header[..], &block.to_le_bytes()[..3], bytes].concat()
    }

    fn zboot(name: &str, payload: &[u8]) -> Vec<u8> {
        let mut file = vec![0; 512];
        let len = u32::try_from(payload.len()).unwrap().to_le_bytes();
        for (at, bytes) in [
            (0, &b"MZ\0\0zimg"[..]),
            (ZBOOT_OFFSET_AT, &512_u32.to_le_bytes()),
            (ZBOOT_LEN_AT, &len),
            (ZBOOT_TYPE_AT, name.as_bytes()),
            (56, &0x8182_23cd_u32.to_le_bytes()),
        ] {
            file[at..at + bytes.len()].copy_from_slice(bytes);
        }
        // Linux appends the unpacked length.
        [&file, payload, b"\0\x20\0\0"].concat()
    }

    fn x86() -> Vec<u8> {
        let mut file = vec![0; 4096];
        file[..2].copy_from_slice(b"MZ");
        file[0x202..0x206].copy_from_slice(b"HdrS");
        file
    }

    /// The unpacked kernel, or the line that refuses it.
    fn opened(bytes: &[u8]) -> Result<Vec<u8>, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        let mut kernel = KernelImage::open(file.path()).map_err(|why| {
            let line = why.to_string();
            line.replace(&file.path().display().to_string(), "FILE")
        })?;
        assert_eq!(kernel.header.size, 1 << 20);
        let mut read = Vec::new();
        kernel
            .file
            .rewound()
            .unwrap()
            .read_to_end(&mut read)
            .unwrap();
        Ok(read)
    }

    #[test]
    fn each_format_gives_the_kernel() {
        let plain = plain();
        let zst = zstd(&plain[..], CompressionLevel::Fastest);
        for (name, file) in [
            ("Image", plain.clone()),
            ("Image.gz", gzip(&plain)),
            ("Image.gz-dtb", [gzip(&plain), vec![0xd0; 99]].concat()),
            ("Image.zst", zst.clone()),
            ("zboot gzip", zboot("gzip", &gzip(&plain))),
            ("zboot zstd", zboot("zstd", &zst)),
            ("zboot zstd22", zboot("zstd22", &zstd22(&plain))),
        ] {
            let kernel = opened(&file).unwrap_or_else(|why| panic!("{name}: {why}"));
            assert!(kernel == plain, "{name}: {} bytes", kernel.len());
        }
    }

    /// A file with its name, and a part of the line that refuses it.
    type Row<'a> = (&'a str, Vec<u8>, &'a str);

    fn check(rows: impl IntoIterator<Item = Row<'static>>) {
        for (name, file, why) in rows {
            let line = opened(&file).expect_err(name);
            let begins = line.starts_with("kernel FILE ");
            assert!(begins && line.contains(why), "{name}: {line}");
            assert_eq!(line.lines().count(), 1, "{name}: {line}");
        }
    }

    fn cut(file: &[u8], by: usize) -> Vec<u8> {
        file[..file.len() - by].to_vec()
    }

    fn with(file: &[u8], at: usize, byte: u8) -> Vec<u8> {
        let mut file = file.to_vec();
        file[at] = byte;
        file
    }

    #[test]
    fn cut_and_damaged_files_have_their_line() {
        const SHORT: &str = "is truncated: it has";
        const ENDS: &str = "is truncated: its packed data ends early";
        const BAD: &str = "is damaged: its packed data";
        let plain = plain();
        let gz = gzip(&plain);
        let zst = zstd(&plain[..], CompressionLevel::Fastest);
        let (zboot_gz, zboot_zst) = (zboot("gzip", &gz), zboot("zstd", &zst));
        check([
            ("empty", vec![], "truncated: it has 0 bytes"),
            ("two bytes", b"MZ".to_vec(), "truncated: it has 2 bytes"),
            ("Image", cut(&plain, 1), SHORT),
            ("gzip, its end", cut(&gz, 1), ENDS),
            ("gzip, a half", cut(&gz, gz.len() / 2), ENDS),
            ("gzip, its header", gz[..5].to_vec(), ENDS),
            ("gzip, its checksum", with(&gz, gz.len() - 8, 1), BAD),
            ("gzip of half an Image", gzip(&plain[..999]), SHORT),
            ("zstd", cut(&zst, 9), ENDS),
            ("zstd, its checksum", with(&zst, zst.len() - 1, 1), BAD),
            ("zboot gzip", cut(&zboot_gz, 5), SHORT),
            ("zboot zstd", cut(&zboot_zst, 5), SHORT),
            ("zboot, its header", zboot_gz[..60].to_vec(), SHORT),
            ("zboot, 4 GiB", with(&zboot_gz, 15, 0xff), SHORT),
            (
                "zboot, offset 0",
                with(&zboot_gz, 9, 0),
                "is damaged: its zboot header",
            ),
            ("zboot zstd, a byte", with(&zboot_zst, 513, 0), BAD),
        ]);
    }

    #[test]
    fn other_kernels_and_formats_have_their_line() {
        check([
            ("x86", x86(), "is an x86 kernel (bzImage)"),
            ("x86 in gzip", gzip(&x86()), "is an x86 kernel (bzImage)"),
            ("text in gzip", gzip(&[7; 500]), "isn't an arm64 Image"),
            (
                "text in zboot",
                zboot("zstd", &zstd22(&[7; 500])),
                "isn't an arm64 Image",
            ),
            (
                "zboot xz",
                zboot("xzkern", b"x"),
                "tail -c +513 FILE | head -c 1 | xz -dc > Image",
            ),
            ("zboot lz4", zboot("lz4", b"x"), "with lz4; unpack it"),
            ("zboot lzma", zboot("lzma", b"x"), "with lzma; unpack it"),
            ("zboot lzo", zboot("lzo", b"x"), "with lzo; unpack it"),
            ("zboot bzip2", zboot("bzip2", b"x"), "with bzip2; unpack it"),
            (
                "zboot other",
                zboot("\x1b[31m", b"x"),
                "unknown compression (\\x1b[31m)",
            ),
            (
                "xz",
                b"\xfd7zXZ\0".to_vec(),
                "with xz; unpack it: xz -dc FILE > Image",
            ),
        ]);
    }

    #[test]
    fn what_unpacks_to_too_much_is_refused() {
        let most = 1 << 20;
        let mut sink = Sink::new(io::sink(), most);
        // 32 blocks of 128 KiB of one byte each: 4 bytes for each of them.
        let repeated = [&(((128_u32 << 10) << 3) | 2).to_le_bytes()[..3], b"\0"].concat();
        let bomb = [&b"\x28\xb5\x2f\xfd\0\x50"[..], &repeated.repeat(32)].concat();
        let zstd = unzstd(&bomb, &mut sink).unwrap_err().to_string();
        let mut sink = Sink::new(io::sink(), most);
        let gzip = gunzip(&gzip(&vec![0; (1 << 20) + 1]), &mut sink);
        for line in [zstd, gzip.unwrap_err().to_string()] {
            assert!(line.contains("more than the 1048576 bytes"), "{line}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_panic(
            kind in 0..5_usize,
            cut in prop_oneof![0..70_usize, 0..9000_usize],
            changes in prop::collection::vec((0..9000_usize, any::<u8>()), 0..8),
            random in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let plain = plain();
            let zst = zstd(&plain[..], CompressionLevel::Fastest);
            let mut file = match kind {
                0 => random,
                1 => gzip(&plain),
                2 => zboot("gzip", &gzip(&plain)),
                3 => zboot("zstd", &zst),
                _ => zst,
            };
            for (at, byte) in changes {
                let len = file.len().max(1);
                if let Some(place) = file.get_mut(at % len) {
                    *place = byte;
                }
            }
            file.truncate(cut);
            let _ = opened(&file);
        }
    }
}
