package hpack

// huffLen holds the code length of each octet (RFC 7541 appendix B). The code
// is canonical: codes of one length ascend with the octet, so that the lengths
// are the whole table. EOS, all ones, has 30 bits and follows the last of them.
var huffLen = [256]uint8{
	13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28,
	28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
	6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6,
	5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10,
	13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
	7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
	15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5,
	6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28,
	20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
	24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
	22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23,
	21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
	26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25,
	19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
	20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
	26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
}

const (
	huffShort = 8  // bits that huffRoot resolves
	huffMax   = 30 // longest code
)

var (
	huffRoot  [1 << huffShort]struct{ sym, len uint8 } // len 0: a longer code
	huffLimit [huffMax + 1]uint32                      // a left-aligned window below it holds a code of that length or shorter
	huffFirst [huffMax + 1]uint32                      // first code of a length, left-aligned
	huffBase  [huffMax + 1]int                         // its place in huffSyms
	huffSyms  [256]uint8                               // octets ordered by code
)

func init() {
	code, n := uint32(0), 0
	for l := 1; l <= huffMax; l++ {
		huffFirst[l], huffBase[l] = code<<(32-l), n
		for sym, sl := range huffLen {
			if int(sl) != l {
				continue
			}
			if l <= huffShort {
				for i := code << (huffShort - l); i < (code+1)<<(huffShort-l); i++ {
					huffRoot[i].sym, huffRoot[i].len = uint8(sym), uint8(l)
				}
			}
			huffSyms[n] = uint8(sym)
			n++
			code++
		}
		huffLimit[l] = code << (32 - l)
		code <<= 1
	}
}

// appendHuffman decodes src onto dst (RFC 7541 5.2): EOS, padding of more than
// seven bits and padding other than ones are errors.
func appendHuffman(dst, src []byte) ([]byte, bool) {
	var (
		acc  uint64 // bits not decoded yet, left-aligned
		bits uint   // how many
	)
	for {
		for bits <= 56 && len(src) > 0 {
			acc |= uint64(src[0]) << (56 - bits)
			src = src[1:]
			bits += 8
		}
		e := huffRoot[acc>>(64-huffShort)]
		l, sym := uint(e.len), e.sym
		if l == 0 {
			w := uint32(acc >> 32)
			for l = huffShort + 1; l <= huffMax && w >= huffLimit[l]; l++ {
			}
			if l > huffMax { // EOS, or padding so long that it reads as EOS
				return dst, bits < 8 && padded(acc, bits)
			}
			if l <= bits {
				sym = huffSyms[huffBase[l]+int((w-huffFirst[l])>>(32-l))]
			}
		}
		if l > bits {
			return dst, bits < 8 && padded(acc, bits)
		}
		dst = append(dst, sym)
		acc <<= l
		bits -= l
	}
}

// padded reports whether the bits left are all ones.
func padded(acc uint64, bits uint) bool { return acc>>(64-bits) == 1<<bits-1 }
