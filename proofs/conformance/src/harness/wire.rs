//! Frames on the port between the host and a guest's agent: one byte for the kind, four for the length, then the
//! content.

use std::io::{self, Read, Write};

/// The maximum length of a frame; a longer one means that the stream is not from an agent or harness.
const MOST_BYTES: usize = 1 << 24;

/// A frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Frame {
    /// From the guest: it has booted. The text is the kernel's release.
    Hello(String),
    /// To the guest: a script to run.
    Script(String),
    /// From the guest: output of the script.
    Output(Vec<u8>),
    /// From the guest, when the script has ended: the end of its standard error, with its trace.
    Errors(Vec<u8>),
    /// From the guest: the script's exit status, or 128 plus the number of the signal that ended it.
    Status(i32),
}

impl Frame {
    /// Writes the frame.
    ///
    /// # Errors
    /// If the writer fails.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let (kind, bytes) = match self {
            Frame::Hello(text) => (b'H', text.as_bytes().to_vec()),
            Frame::Script(text) => (b'S', text.as_bytes().to_vec()),
            Frame::Output(bytes) => (b'O', bytes.clone()),
            Frame::Errors(bytes) => (b'E', bytes.clone()),
            Frame::Status(status) => (b'X', status.to_le_bytes().to_vec()),
        };
        let len = u32::try_from(bytes.len()).map_err(|_| io::Error::other("a frame of 4 GiB"))?;
        let mut frame = vec![kind];
        frame.extend(len.to_le_bytes());
        frame.extend(bytes);
        out.write_all(&frame)?;
        out.flush()
    }

    /// Reads a frame.
    ///
    /// # Errors
    /// If the reader fails or the stream ends; [`io::ErrorKind::InvalidData`] for an invalid frame.
    pub fn read(input: &mut impl Read) -> io::Result<Frame> {
        let mut head = [0; 5];
        input.read_exact(&mut head)?;
        let len = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
        let wrong = || io::Error::new(io::ErrorKind::InvalidData, format!("no frame begins with {head:02x?}"));
        if len > MOST_BYTES {
            return Err(wrong());
        }
        let mut bytes = vec![0; len];
        input.read_exact(&mut bytes)?;
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).map_err(|_| wrong());
        match head[0] {
            b'H' => Ok(Frame::Hello(text(bytes)?)),
            b'S' => Ok(Frame::Script(text(bytes)?)),
            b'O' => Ok(Frame::Output(bytes)),
            b'E' => Ok(Frame::Errors(bytes)),
            b'X' => Ok(Frame::Status(i32::from_le_bytes(bytes.try_into().map_err(|_| wrong())?))),
            _ => Err(wrong()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_as_they_went() {
        let frames = [
            Frame::Hello("6.1".into()),
            Frame::Script("true".into()),
            Frame::Output(vec![0, 255]),
            Frame::Errors(vec![1]),
            Frame::Status(-1),
        ];
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.write(&mut bytes).unwrap());
        let mut input = bytes.as_slice();
        for frame in frames {
            assert_eq!(Frame::read(&mut input).unwrap(), frame);
        }
        assert_eq!(Frame::read(&mut input).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn invalid_frames_are_refused() {
        for bytes in [&b"?\0\0\0\0"[..], b"O\xff\xff\xff\xff", b"X\x01\0\0\0\0", b"H\x01\0\0\0\xff"] {
            assert_eq!(Frame::read(&mut &*bytes).unwrap_err().kind(), io::ErrorKind::InvalidData, "{bytes:?}");
        }
    }
}
