package sniff

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"
)

// datagramsOf cuts b into datagrams: two bytes of length before each.
func datagramsOf(b []byte) (l [][]byte) {
	for len(b) >= 2 && len(l) < MaxDatagrams+3 {
		n := min(int(binary.BigEndian.Uint16(b)), len(b)-2)
		l = append(l, b[2:2+n:2+n])
		b = b[2+n:]
	}
	return l
}

func asInput(datagrams ...[]byte) (b []byte) {
	for _, d := range datagrams {
		b = append(binary.BigEndian.AppendUint16(b, uint16(len(d))), d...)
	}
	return b
}

// FuzzQUIC: whatever comes, nothing panics, an answer once given stays, what is found
// is found by all who look, and memory is bounded.
func FuzzQUIC(f *testing.F) {
	s := newSealer(v1, rfcDCID)
	hello := helloOf("cart")
	f.Add(asInput(s.initial(0, cryptoFrame(0, hello))))
	f.Add(asInput(s.initial(0, cryptoFrame(9, hello[9:])), s.initial(1, cryptoFrame(0, hello[:9]))))
	f.Add(asInput(append(s.opaque(QUICZeroRTT, 40), s.initial(3, cryptoFrame(0, hello))...), []byte("\x40short")))
	f.Add(asInput(s.start(QUICRetry, 0), []byte{0x80, 0, 0, 0, 0, 0, 0}))
	f.Add(asInput(newSealer(v2, nil).initial(0, cryptoFrame(0, hello))))
	f.Fuzz(func(t *testing.T, b []byte) {
		before := bytes.Clone(b)
		var one, two QUICState
		final, known := "", false
		for i, d := range datagramsOf(b) {
			r := one.Datagram(d)
			got := showQUIC(r)
			if copied := showQUIC(two.Datagram(bytes.Clone(d))); copied != got {
				t.Fatalf("datagram %d: %s, and of a copy %s", i+1, got, copied)
			}
			last := one.Last()
			switch {
			case final != "" && got != final:
				t.Fatalf("%s was final, %s after datagram %d", final, got, i+1)
			case known && r.Proto != QUIC:
				t.Fatalf("no longer QUIC after datagram %d", i+1)
			case last.More || last.Proto == None:
				t.Fatalf("Last says %s", showQUIC(last))
			case !r.More && showQUIC(last) != got:
				t.Fatalf("Datagram %s, Last %s", got, showQUIC(last))
			case r.More && fmt.Sprint(columns(r.Hello)) != "[- - - - -]":
				t.Fatalf("names before the answer: %s", got)
			case r.More && i+1 >= MaxDatagrams:
				t.Fatalf("more after %d datagrams", i+1)
			case r.Proto == Unknown && r.More, len(r.DCID) > maxCID:
				t.Fatalf("%s", got)
			case cap(one.stream) > maxCrypto || one.whole > len(one.stream) || cap(one.scratch) > 2*maxDatagram:
				t.Fatalf("stream %d, scratch %d bytes", cap(one.stream), cap(one.scratch))
			}
			known = r.Proto == QUIC
			if !r.More {
				final = got
			}
		}
		if !bytes.Equal(b, before) {
			t.Fatal("Datagram wrote to its input")
		}
	})
}

// FuzzQUICFrames puts hostile payloads into packets that authenticate, and holds the
// reassembly against a slow and obvious one: a map of bytes, and the hello read at once.
func FuzzQUICFrames(f *testing.F) {
	hello := helloOf("cart")
	f.Add(asInput(cryptoFrame(0, hello)))
	f.Add(asInput(cryptoFrame(9, hello[9:]), append([]byte{framePing, 0, 0}, cryptoFrame(0, hello[:9])...)))
	f.Add(asInput(append(cryptoFrame(5, hello[5:20]), cryptoFrame(2, hello[2:])...), cryptoFrame(0, hello[:3])))
	f.Add(asInput([]byte{frameAck, 5, 0, 1, 2, 0, 1}, cryptoFrame(0, build(ext(21, make([]byte, 400)...), nameExt("late")))))
	f.Add(asInput([]byte{frameConnClose, 0, 6, 2, 'n', 'o'}, cryptoFrame(maxCrypto-2, []byte("over")), []byte{0x1e}))
	s := newSealer(v1, rfcDCID)
	f.Fuzz(func(t *testing.T, b []byte) {
		var q QUICState
		there := map[uint64]byte{}
		packets := 0
		for _, payload := range datagramsOf(b) {
			if len(payload) == 0 {
				continue
			}
			payload = payload[:min(len(payload), 16000):min(len(payload), 16000)]
			r := q.Datagram(s.initial(uint32(packets), payload))
			packets++
			if len(payload) < 4 {
				payload = append(payload, 0, 0, 0)[:4] // as the sealer pads it
			}
			for offset, c := range slowFrames(payload) {
				if _, ok := there[offset]; !ok {
					there[offset] = c
				}
			}
			var stream []byte
			for c, ok := there[0]; ok && len(stream) < maxCrypto; c, ok = there[uint64(len(stream))] {
				stream = append(stream, c)
			}
			var o offer
			o.read(stream, 0, len(stream), maxCrypto)
			want := fmt.Sprint(QUIC, !o.done() && len(stream) < maxCrypto && packets < MaxDatagrams, columns(o.hello(stream)))
			if got := fmt.Sprint(r.Proto, r.More, columns(q.Last().Hello)); got != want {
				t.Fatalf("after %d packets\ngot  %s\nwant %s", packets, got, want)
			}
			if !r.More {
				return
			}
		}
	})
}

// slowFrames are the CRYPTO bytes of a payload by their offsets, none where anything in it is wrong.
func slowFrames(p []byte) map[uint64]byte {
	crypto := map[uint64]byte{}
	bad := false
	number := func() (v uint64) {
		if len(p) == 0 || len(p) < 1<<(p[0]>>6) {
			bad = true
			return 0
		}
		n := 1 << (p[0] >> 6)
		v = uint64(p[0] & 63)
		for _, c := range p[1:n] {
			v = v<<8 | uint64(c)
		}
		p = p[n:]
		return v
	}
	for len(p) > 0 && !bad {
		switch kind := number(); kind {
		case 0, 1:
		case 2, 3:
			number()
			number()
			n := number()
			number()
			for i := uint64(0); i < n && !bad; i++ {
				number()
				number()
			}
			if kind == 3 {
				number()
				number()
				number()
			}
		case 6:
			offset, n := number(), number()
			if bad || n > uint64(len(p)) || offset+n > 1<<62-1 {
				return nil
			}
			for i, c := range p[:n] {
				if _, ok := crypto[offset+uint64(i)]; !ok {
					crypto[offset+uint64(i)] = c
				}
			}
			p = p[n:]
		case 0x1c:
			number()
			number()
			n := number()
			if bad || n > uint64(len(p)) {
				return nil
			}
			p = p[n:]
		default:
			return nil
		}
	}
	if bad {
		return nil
	}
	return crypto
}

func BenchmarkQUIC(b *testing.B) {
	s := newSealer(v1, rfcDCID)
	datagram := s.initial(0, padded(cryptoFrame(0, helloOf("cart.shop.example"))))
	b.ReportAllocs()
	for b.Loop() {
		var q QUICState
		if q.Datagram(datagram).Proto != QUIC {
			b.Fatal("not found")
		}
	}
}
