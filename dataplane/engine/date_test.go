package engine

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
)

// TestDates: whenever it is asked, the date is of the second that the clock is in, in the form of RFC 9110 5.6.7, and the
// clock is read once a second at most, also where it is set.
func TestDates(t *testing.T) {
	var d dates
	wall, mono, reads := time.Date(2026, 2, 28, 23, 59, 57, 999_000_000, time.FixedZone("", 5400)), int64(time.Hour), 0
	clock := func() time.Time { reads++; return wall }
	seconds := map[string]bool{}
	for i := range 5000 {
		got := string(d.at(mono, clock))
		at, err := http.ParseTime(got)
		if want := wall.UTC().Truncate(time.Second); err != nil || !at.Equal(want) || got != want.Format(http.TimeFormat) {
			t.Fatalf("step %d: %q, want %v", i, got, want)
		}
		if seconds[got] = true; reads != len(seconds) {
			t.Fatalf("step %d: the clock was read %d times in %d seconds", i, reads, len(seconds))
		}
		step := time.Duration(7+i%13) * time.Millisecond
		wall, mono = wall.Add(step), mono+int64(step)
	}
	wall = wall.Add(-time.Hour) // it is set: the next second has the right one
	mono += int64(time.Second)
	wall = wall.Add(time.Second)
	if got := string(d.at(mono, clock)); got != wall.UTC().Format(http.TimeFormat) {
		t.Errorf("%s after the clock was set to %v", got, wall)
	}
	if n := testing.AllocsPerRun(100, func() { mono += int64(time.Second); d.at(mono, clock) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestAnswersHaveADate (RFC 9110 6.6.1): every final answer has one Date, an application's own as it is, ours where it has
// none; interim answers have none.
func TestAnswersHaveADate(t *testing.T) {
	const own = "Tue, 15 Nov 1994 08:12:31 GMT"
	answers := map[string]string{
		"/none":    "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
		"/own":     "HTTP/1.1 200 OK\r\nDate: " + own + "\r\nContent-Length: 2\r\n\r\nok",
		"/204":     "HTTP/1.1 204 No Content\r\n\r\n",
		"/304":     "HTTP/1.1 304 Not Modified\r\n\r\n",
		"/500":     "HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n",
		"/interim": "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
		"/chunks":  "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
	}
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	defer s.e.RemovePod(pod)
	v := &svc{pod: pod, to: s.app(heads(func(c *net.TCPConn, _ *bufio.Reader, line string) bool {
		io.WriteString(c, answers[strings.Fields(line)[1]])
		return true
	})), request: func(x *exchange.Exchange) bool {
		if string(x.Req.Path) == "/ours" {
			x.Reply(&httpmsg.Head{Status: 403}, []byte("no\n"))
			return true
		}
		return false
	}}
	h1, h2 := s.front(pod, v, false), s.front(pod, v, true)
	is := func(what string, got []string, want string) {
		t.Helper()
		if len(got) != 1 {
			t.Errorf("%s: %d dates %q", what, len(got), got)
			return
		}
		at, err := http.ParseTime(got[0])
		switch ago := time.Since(at); {
		case want != "" && got[0] != want:
			t.Errorf("%s: %q, want %q", what, got[0], want)
		case want == "" && (err != nil || ago < 0 || ago > time.Minute):
			t.Errorf("%s: %q, %v ago", what, got[0], ago)
		}
	}
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	for name, c := range map[string]*http.Client{
		"http1": {Transport: &http.Transport{DialContext: to(h1)}},
		"h2c":   {Transport: &http.Transport{DialContext: to(h2), Protocols: p}},
	} {
		for _, path := range []string{"/none", "/own", "/204", "/304", "/500", "/interim", "/chunks", "/ours"} {
			for _, method := range []string{"GET", "HEAD"} {
				if method == "HEAD" && (path == "/chunks" || path == "/none" || path == "/own" || path == "/interim") {
					continue // the application above sends a body whatever it is asked
				}
				req, err := http.NewRequest(method, "http://a"+path, nil)
				if err != nil {
					t.Fatal(err)
				}
				res, err := c.Do(req)
				if err != nil {
					t.Fatalf("%s %s %s: %v", name, method, path, err)
				}
				_, _ = io.Copy(io.Discard, res.Body)
				res.Body.Close()
				want := ""
				if path == "/own" {
					want = own
				}
				is(fmt.Sprint(name, " ", method, " ", path), res.Header.Values("Date"), want)
			}
		}
		c.CloseIdleConnections()
	}
	// What the codecs answer.
	c, err := net.Dial("tcp", h1)
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(c, "nonsense\r\n\r\n")
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	is("400", res.Header.Values("Date"), "")
	c.Close()
	many, _ := http.NewRequest("GET", "http://a/none", nil)
	for i := range 150 {
		many.Header.Set(fmt.Sprint("x-", i), "y")
	}
	r2, err := (&http.Client{Transport: &http.Transport{DialContext: to(h2), Protocols: p}}).Do(many)
	if err != nil || r2.StatusCode != 431 {
		t.Fatal(r2, err)
	}
	is("431", r2.Header.Values("Date"), "")
	// An interim head has none.
	c, err = net.Dial("tcp", h1)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	io.WriteString(c, "GET /interim HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
	all, _ := io.ReadAll(c)
	first, rest, _ := strings.Cut(string(all), "\r\n\r\n")
	if !strings.HasPrefix(first, "HTTP/1.1 103") || strings.Contains(strings.ToLower(first), "date:") || strings.Count(strings.ToLower(rest), "\r\ndate: ") != 1 {
		t.Errorf("%q", all)
	}
}
