//! P and Q of RAID5 and RAID6, and the pieces that they restore.
//!
//! Bytes are elements of the field with 256 elements and the polynomial 11Dh. P is the sum of all data pieces, that is,
//! their exclusive or. Q is the sum of the data pieces, each multiplied by 2 to the power of its number. One missing
//! piece can be computed from either of them, two from both.

/// The role of a piece in its row.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Role {
    /// Data, with its number in the row.
    Data(usize),
    /// The sum.
    P,
    /// The weighted sum.
    Q,
}

/// The available pieces are not sufficient.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ParityError {
    /// More pieces are missing than there is parity.
    #[error("{missing} data pieces of a row are missing, and {parities} of parity are there")]
    TooFew {
        /// Data pieces that are missing.
        missing: usize,
        /// Available pieces of parity.
        parities: usize,
    },
    /// The pieces have different lengths, or the requested piece does not exist.
    #[error("the pieces of a row do not fit together")]
    Shape,
}

/// The number of different powers of 2 in a field of 256 elements.
const ORDER: usize = 255;

/// The powers of 2, twice in a row, and the logarithm of each element except 0.
struct Tables {
    power: [u8; 2 * ORDER],
    logarithm: [u8; 256],
}

static TABLES: Tables = tables();

const fn tables() -> Tables {
    let (mut power, mut logarithm) = ([0; 2 * ORDER], [0; 256]);
    let (mut value, mut exponent) = (1_u16, 0);
    while exponent < ORDER {
        power[exponent] = value as u8;
        power[exponent + ORDER] = value as u8;
        logarithm[value as usize] = exponent as u8;
        value <<= 1;
        if value & 0x100 != 0 {
            value ^= 0x11d;
        }
        exponent += 1;
    }
    Tables { power, logarithm }
}

/// Two to the power of `exponent`.
fn power(exponent: usize) -> u8 {
    TABLES.power[exponent % ORDER]
}

fn multiply(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        return 0;
    }
    TABLES.power[usize::from(TABLES.logarithm[usize::from(a)]) + usize::from(TABLES.logarithm[usize::from(b)])]
}

/// The inverse of `a`, which is not 0.
fn inverse(a: u8) -> u8 {
    TABLES.power[ORDER - usize::from(TABLES.logarithm[usize::from(a)])]
}

fn add_to(sum: &mut [u8], piece: &[u8], factor: u8) {
    let pairs = sum.iter_mut().zip(piece);
    match factor {
        // Most pieces only have to be added.
        1 => pairs.for_each(|(sum, byte)| *sum ^= byte),
        _ => pairs.for_each(|(sum, byte)| *sum ^= multiply(*byte, factor)),
    }
}

/// P of all data pieces of a row, which have the same length.
pub fn p(data: &[&[u8]]) -> Vec<u8> {
    let mut sum = vec![0; data.first().map_or(0, |piece| piece.len())];
    data.iter().for_each(|piece| add_to(&mut sum, piece, 1));
    sum
}

/// Q of all data pieces of a row, which have the same length.
pub fn q(data: &[&[u8]]) -> Vec<u8> {
    let mut sum = vec![0; data.first().map_or(0, |piece| piece.len())];
    data.iter().enumerate().for_each(|(number, piece)| add_to(&mut sum, piece, power(number)));
    sum
}

/// Restores the data piece with this number from its row: all data pieces in order, and parity. A `None` piece is
/// missing or damaged. Only a checksum can show whether the result is right.
///
/// # Errors
/// If too many pieces are missing, or if the pieces do not form a row.
pub fn restore(
    wanted: usize,
    data: &[Option<&[u8]>],
    p: Option<&[u8]>,
    q: Option<&[u8]>,
) -> Result<Vec<u8>, ParityError> {
    if let Some(piece) = data.get(wanted).ok_or(ParityError::Shape)? {
        return Ok(piece.to_vec());
    }
    let missing: Vec<usize> = (0..data.len()).filter(|number| data[*number].is_none()).collect();
    let parities = usize::from(p.is_some()) + usize::from(q.is_some());
    let too_few = ParityError::TooFew { missing: missing.len(), parities };
    let bytes = p.or(q).ok_or(too_few)?.len();
    let fits = data.iter().flatten().copied().chain(p).chain(q).all(|piece| piece.len() == bytes);
    if !fits || data.len() > ORDER {
        return Err(ParityError::Shape);
    }
    let present = || data.iter().enumerate().filter_map(|(number, piece)| Some((number, (*piece)?)));
    // The contribution of the missing pieces to P and to Q.
    let rest_of = |parity: &[u8], weight: fn(usize) -> u8| {
        let mut rest = parity.to_vec();
        present().for_each(|(number, piece)| add_to(&mut rest, piece, weight(number)));
        rest
    };
    match (&missing[..], p, q) {
        ([_], Some(p), _) => Ok(rest_of(p, |_| 1)),
        ([_], None, Some(q)) => {
            let mut piece = vec![0; bytes];
            add_to(&mut piece, &rest_of(q, power), inverse(power(wanted)));
            Ok(piece)
        }
        ([one, two], Some(p), Some(q)) => {
            // a + b = P and 2^i a + 2^j b = Q, so (2^i + 2^j) a = Q + 2^j P.
            let other = if wanted == *one { *two } else { *one };
            let (mut sum, weighted) = (rest_of(q, power), rest_of(p, |_| 1));
            add_to(&mut sum, &weighted, power(other));
            let mut piece = vec![0; bytes];
            add_to(&mut piece, &sum, inverse(power(wanted) ^ power(other)));
            Ok(piece)
        }
        _ => Err(too_few),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_field_is_that_of_its_polynomial() {
        assert_eq!((multiply(0x80, 2), multiply(2, 0x80), multiply(0, 7)), (0x1d, 0x1d, 0));
        assert_eq!((power(0), power(8), power(255)), (1, 0x1d, 1));
        assert!((1..=255).all(|a| multiply(a, inverse(a)) == 1));
    }

    #[test]
    fn parity_of_known_pieces() {
        let data: [&[u8]; 3] = [&[1, 0x80], &[2, 0x80], &[4, 0]];
        assert_eq!((p(&data), q(&data)), (vec![7, 0], vec![1 ^ 4 ^ 16, 0x80 ^ 0x1d]));
    }

    #[test]
    fn too_few_pieces_and_pieces_that_do_not_fit_are_refused() {
        let (a, b): (&[u8], &[u8]) = (&[1, 2], &[3, 4]);
        assert_eq!(restore(0, &[None, Some(b)], None, None), Err(ParityError::TooFew { missing: 1, parities: 0 }));
        let error = Err(ParityError::TooFew { missing: 2, parities: 1 });
        assert_eq!(restore(0, &[None, None, Some(b)], Some(a), None), error);
        assert_eq!(restore(2, &[Some(a), Some(b)], Some(a), None), Err(ParityError::Shape));
        assert_eq!(restore(0, &[None, Some(b)], Some(&[1]), None), Err(ParityError::Shape));
        assert_eq!(
            restore(0, &[None, None, None], Some(a), Some(b)).unwrap_err().to_string().split(' ').next(),
            Some("3")
        );
    }

    proptest! {
        #[test]
        fn any_two_missing_pieces_come_back(
            data in (1..9_usize).prop_flat_map(|count| proptest::collection::vec(proptest::collection::vec(any::<u8>(), 16), count)),
            lost in proptest::sample::subsequence((0..10_usize).collect::<Vec<_>>(), 0..=2),
        ) {
            let pieces: Vec<&[u8]> = data.iter().map(|piece| &piece[..]).collect();
            let (p, q) = (p(&pieces), q(&pieces));
            // Numbers 8 and 9 are P and Q, for any number of data pieces.
            let there: Vec<Option<&[u8]>> =
                pieces.iter().enumerate().map(|(number, piece)| Some(*piece).filter(|_| !lost.contains(&number))).collect();
            let (p, q) = (Some(&p[..]).filter(|_| !lost.contains(&8)), Some(&q[..]).filter(|_| !lost.contains(&9)));
            for (wanted, piece) in pieces.iter().enumerate() {
                prop_assert_eq!(&restore(wanted, &there, p, q).unwrap(), piece, "{} without {:?}", wanted, lost);
            }
        }
    }
}
