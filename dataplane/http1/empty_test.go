package http1

import (
	"fmt"
	"strings"
	"testing"

	"aether/dataplane/httpmsg"
	"aether/sniff"
)

// TestEmptyLinesLikeTheSniffer: whatever stands before a request and however it is cut, what is sniffed as HTTP is read as a
// request, by a driver that takes empty lines from the stream and by one that does not; what is not sniffed as HTTP is refused
// by the codec, and is taken to it at an HTTP port.
func TestEmptyLinesLikeTheSniffer(t *testing.T) {
	if maxEmptyLines != sniff.MaxEmptyLines {
		t.Errorf("%d empty lines here, %d in sniff", maxEmptyLines, sniff.MaxEmptyLines)
	}
	const get = "GET / HTTP/1.1\r\nHost: a\r\n\r\n"
	for k := range 12 {
		for _, odd := range []string{"", "\r", "\n", " ", "\r\r\n", "\n\r\n"} {
			in := strings.Repeat("\r\n", k) + odd + get
			want := k <= 8 && odd == ""
			lead := len(in) - len(get) + 4
			for cut := range lead {
				for _, at := range [][]int{{cut}, {cut, min(cut+1, lead)}, {cut / 2, cut}} {
					if err := sniffed(in, at); want != (err == nil) {
						t.Fatalf("%q cut at %d, sniffed: %v", in, at, err)
					}
					for _, taking := range []bool{true, false} {
						if err := parsed(in, at, taking); want != (err == nil) {
							t.Fatalf("%q cut at %d, parsed, lines taken %v: %v", in, at, taking, err)
						}
					}
				}
			}
			if yes, more := sniff.BeginsRequest([]byte(in)); !want && (!yes || more) {
				t.Errorf("%q does not begin like a request: an HTTP port would hand it on", in)
			}
		}
	}
}

func sniffed(in string, cuts []int) error {
	var s sniff.State
	for _, n := range append(cuts[:len(cuts):len(cuts)], len(in)) {
		if r := s.Detect([]byte(in[:n])); !r.More && r.Proto != sniff.HTTP11 && n > 0 {
			return fmt.Errorf("%v", r.Proto)
		}
	}
	if host, _, ok := s.RequestHost([]byte(in)); !ok || string(host) != "a" {
		return fmt.Errorf("host %q", host)
	}
	return nil
}

// parsed reads in as it arrives; taking: empty lines are taken from the stream as soon as they are all that is there.
func parsed(in string, cuts []int, taking bool) error {
	var p Parser
	var h httpmsg.Head
	from := 0
	for _, n := range append(cuts[:len(cuts):len(cuts)], len(in)) {
		b := []byte(in[from:n])
		used, _, err := p.Request(b, &h)
		switch {
		case err != nil:
			return err
		case used > 0 && used == len(b) && n == len(in) && string(h.Method) == "GET":
			return nil
		case used > 0:
			return fmt.Errorf("%d of %d bytes", used, len(b))
		case taking:
			from += p.EmptyLines(b)
		}
	}
	return fmt.Errorf("not whole")
}
