//! The content of files, and the digest by which contents are compared.
//!
//! The digest must not depend on how a file is stored: zeroes may be a hole, an extent that was never written, or
//! sectors of zeroes. And a file of 20 GiB with a few bytes must not take as long to hash as 20 GiB of data. So files
//! of up to [`WHOLE_BYTES`] have the usual SHA-256; in larger ones only the blocks that are not all zeroes are hashed,
//! each with its number.

use sha2::{Digest, Sha256};

/// Files up to this size have the SHA-256 of all their bytes.
pub const WHOLE_BYTES: u64 = 64 << 20;
/// The unit in which zeroes of larger files are skipped.
const BLOCK_BYTES: usize = 64 << 10;

/// The text at the start of all compressed files; a shorter text is a prefix of a longer one.
pub fn text(bytes: usize) -> Vec<u8> {
    let mut text = Vec::with_capacity(bytes + 32);
    let mut number = 0_u64;
    while text.len() < bytes {
        text.extend_from_slice(format!("line {number} of a text.\n").as_bytes());
        number += 1;
    }
    text.truncate(bytes);
    text
}

/// Incompressible bytes, the same for the same seed.
pub fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut noise = vec![0; bytes];
    fastrand::Rng::with_seed(seed).fill(&mut noise);
    noise
}

/// Computes the digest of a file from its bytes in order.
pub struct ContentDigest {
    sha: Sha256,
    size_bytes: u64,
    /// The number of bytes so far.
    position: u64,
    /// The incomplete block of a file larger than [`WHOLE_BYTES`].
    block: Vec<u8>,
}

impl ContentDigest {
    /// Starts a file of this size.
    pub fn new(size_bytes: u64) -> ContentDigest {
        ContentDigest { sha: Sha256::new(), size_bytes, position: 0, block: Vec::new() }
    }

    /// Adds the next bytes.
    pub fn bytes(&mut self, mut bytes: &[u8]) {
        if self.size_bytes <= WHOLE_BYTES {
            self.sha.update(bytes);
            self.position += bytes.len() as u64;
            return;
        }
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(BLOCK_BYTES - self.block.len()));
            self.block.extend_from_slice(now);
            self.position += now.len() as u64;
            bytes = later;
            if self.block.len() == BLOCK_BYTES {
                self.end_block();
            }
        }
    }

    /// Adds this many zeroes. In a large file whole blocks of zeroes cost nothing.
    pub fn zeroes(&mut self, count: u64) {
        static ZEROES: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];
        let mut left = count;
        while left > 0 {
            if self.size_bytes > WHOLE_BYTES && self.block.is_empty() {
                let whole = left / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
                self.position += whole;
                left -= whole;
            }
            let now = left.min((BLOCK_BYTES - self.block.len()) as u64);
            self.bytes(&ZEROES[..now as usize]);
            left -= now;
        }
    }

    fn end_block(&mut self) {
        if self.block.iter().any(|byte| *byte != 0) {
            let number = self.position.div_ceil(BLOCK_BYTES as u64) - 1;
            self.sha.update(number.to_le_bytes());
            self.sha.update(&self.block);
        }
        self.block.clear();
    }

    /// The digest.
    ///
    /// # Errors
    /// The number of bytes differs from the announced size.
    pub fn finish(mut self) -> Result<[u8; 32], String> {
        if self.position != self.size_bytes {
            return Err(format!("{} bytes were read of a file of {}", self.position, self.size_bytes));
        }
        if self.size_bytes > WHOLE_BYTES {
            if !self.block.is_empty() {
                self.end_block();
            }
            self.sha.update(self.size_bytes.to_le_bytes());
        }
        Ok(self.sha.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The digest of pieces: bytes, or a number of zeroes.
    fn digest(size_bytes: u64, pieces: &[Result<&[u8], u64>]) -> [u8; 32] {
        let mut digest = ContentDigest::new(size_bytes);
        for piece in pieces {
            match piece {
                Ok(bytes) => digest.bytes(bytes),
                Err(zeroes) => digest.zeroes(*zeroes),
            }
        }
        digest.finish().unwrap()
    }

    #[test]
    fn a_small_file_has_the_sha_256_of_its_bytes_however_they_come() {
        let expected: [u8; 32] = Sha256::digest([b"front".as_slice(), &[0; 100], b"back"].concat()).into();
        assert_eq!(digest(109, &[Ok(b"front"), Err(100), Ok(b"back")]), expected);
        assert_eq!(digest(109, &[Ok(b"fro"), Ok(b"nt"), Ok(&[0; 60]), Err(40), Ok(b"back")]), expected);
        assert_ne!(digest(109, &[Ok(b"front"), Err(99), Ok(b"\x01back")]), expected);
        assert_eq!(digest(0, &[]), <[u8; 32]>::from(Sha256::digest(b"")));
    }

    #[test]
    fn zeroes_of_a_large_file_count_by_where_they_are_and_not_by_how_they_come() {
        let size = WHOLE_BYTES + 100_001;
        let front = vec![0; 1 << 20];
        let expected = digest(size, &[Err(70_000), Ok(b"data"), Err(size - 70_004)]);
        let left = size - (1 << 20);
        let mut written = front.clone();
        written[70_000..70_004].copy_from_slice(b"data");
        assert_eq!(digest(size, &[Ok(&written), Err(left)]), expected, "zeroes that were written");
        assert_eq!(digest(size, &[Err(70_000), Ok(b"da"), Ok(b"ta"), Err(30_000), Err(size - 100_004)]), expected);
        assert_ne!(digest(size, &[Err(70_001), Ok(b"data"), Err(size - 70_005)]), expected, "another place");
        let block = BLOCK_BYTES as u64;
        let moved = [Err(70_000 + block), Ok(&b"data"[..]), Err(size - 70_004 - block)];
        assert_ne!(digest(size, &moved), expected, "another block");
        let longer = [Err(70_000), Ok(&b"data"[..]), Err(size - 70_003)];
        assert_ne!(digest(size + 1, &longer), expected, "another size");
    }

    #[test]
    fn the_end_of_a_large_file_counts_though_its_block_is_not_whole() {
        let size = WHOLE_BYTES + 10;
        let end = |last: &[u8]| digest(size, &[Err(size - 1), Ok(last)]);
        assert_ne!(end(b"a"), end(b"b"));
        assert_eq!(end(b"\0"), digest(size, &[Err(size)]));
    }

    #[test]
    fn a_file_of_another_length_than_announced_has_no_digest() {
        for given in [9, 11] {
            let mut digest = ContentDigest::new(10);
            digest.bytes(&vec![1; given]);
            assert!(digest.finish().unwrap_err().starts_with(&format!("{given} bytes")));
        }
        let mut digest = ContentDigest::new(WHOLE_BYTES + 1);
        digest.zeroes(WHOLE_BYTES);
        digest.finish().unwrap_err();
    }

    #[test]
    fn contents_come_back_the_same() {
        assert_eq!(text(60), [text(40), text(60)[40..].to_vec()].concat());
        assert_eq!(noise(1000, 7), noise(1000, 7));
        assert_ne!(noise(1000, 7), noise(1000, 8));
    }
}
