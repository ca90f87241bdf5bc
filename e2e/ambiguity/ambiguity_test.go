// Package ambiguity sends requests that two readers may read in two ways, or that should
// be refused, to our proxies and to others, and writes down what became of each:
// docs/ambiguity.md.
//
//   - The table (cases_test.go) is bytes; what an application behind a proxy understood
//     is said by applications that share no code with the product.
//   - What our proxies let through is understood by nginx, net/http and Node behind them
//     as they understood it: as many requests, the same targets and bodies.
//   - go test ./e2e/ambiguity -update writes the page; without the flag the page must
//     hold what is seen.
//
// It needs root, nginx, HAProxy, Node and Envoy.
package ambiguity

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"aether/e2e/counts"
	"aether/e2e/mesh"
)

var update = flag.Bool("update", false, "write docs/ambiguity.md; what the other proxies did before stays in it: remove it to begin anew")

const page = "../../docs/ambiguity.md"

const (
	setUp = 2 * time.Minute
	// quiet is how long a proxy that neither answers nor closes is waited for, until it counts as waiting for more.
	quiet = 5 * time.Second
	// rounds of the proxies that are not ours: what differs from round to round is said.
	rounds = 8
	or     = " or "
)

// seen is what became of a request and of what followed it.
type seen struct {
	// answers are what the client was told, in order: what an application understood
	// where it was asked (it always answers 200), else the status.
	answers []string
	end     string // of the client's connection, where the last answer did not close it: "closed" or "waits"
	passed  int    // how many of the answers are an application's
}

// String is the page's cell.
func (s seen) String() string {
	parts := slices.Clone(s.answers)
	for i, a := range parts {
		if a == "GET app /next" {
			parts[i] = "next"
		}
	}
	if s.end != "" {
		parts = append(parts, s.end)
	}
	return strings.Join(parts, "; ")
}

// send sends a request of the table, with next behind it, and reads until the
// connection ends, or nothing more comes.
func (p *peer) send(ctx context.Context, q string) (seen, error) {
	if left := p.take(); len(left) > 0 {
		return seen{}, fmt.Errorf("%w: %q", errLeft, left)
	}
	c, err := p.dial(ctx)
	if err != nil {
		return seen{}, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(quiet)); err != nil {
		return seen{}, err
	}
	var writing sync.WaitGroup
	writing.Go(func() { io.WriteString(c, withPort([]byte(q+next), p.port)) }) // who is refused may see it fail
	defer writing.Wait()
	defer c.Close()
	var s seen
	var statuses []int
	r := bufio.NewReader(c)
	for {
		var asked *http.Request
		if len(statuses) == 0 && strings.HasPrefix(q, "HEAD ") {
			asked = &http.Request{Method: "HEAD"}
		}
		res, err := http.ReadResponse(r, asked)
		if err != nil {
			var ne net.Error
			if s.end = "closed"; errors.As(err, &ne) && ne.Timeout() {
				s.end = "waits"
			}
			break
		}
		if res.StatusCode/100 == 1 {
			continue
		}
		statuses = append(statuses, res.StatusCode)
		_, err = io.Copy(io.Discard, res.Body)
		res.Body.Close()
		if res.Close || err != nil {
			break
		}
	}
	got := p.take()
	for _, status := range statuses {
		if status == 200 && len(got) > 0 {
			s.answers = append(s.answers, got[0])
			s.passed++
			got = got[1:]
			continue
		}
		s.answers = append(s.answers, strconv.Itoa(status))
	}
	for _, g := range got { // the answer was lost
		s.answers = append(s.answers, g+" (unanswered)")
		s.passed++
	}
	return s, nil
}

func TestTable(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("needs root to make network namespaces")
	}
	ctx, cancel := context.WithTimeout(t.Context(), setUp)
	defer cancel()
	binary := filepath.Join(t.TempDir(), "aether-proxy")
	if out, err := exec.Command("go", "build", "-o", binary, "aether/cmd/aether-proxy").CombinedOutput(); err != nil {
		t.Fatalf("build the proxy: %v\n%s", err, out)
	}
	m, err := mesh.New(ctx, mesh.Options{Proxy: binary})
	if err != nil {
		t.Fatal(err)
	}
	l := &lab{Mesh: m}
	t.Cleanup(func() {
		if t.Failed() {
			for i := range l.Rig.Nodes {
				if p := l.Proxy(i); p != nil {
					t.Logf("log of the proxy of node%d ends:\n%s", i+1, p.Tail(2000))
				}
			}
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := l.up(ctx); err != nil {
		t.Fatal(err)
	}

	old, err := os.ReadFile(page)
	if err != nil && !*update {
		t.Fatal(err)
	}
	was := parse(old)
	versions := ""
	for _, o := range l.others {
		versions += ", " + o.name + " " + o.version
	}
	versions = versions[2:]
	same := strings.Contains(string(old), "\nSeen with "+versions+".\n") // the other columns are those of these versions
	ours := map[string]seen{}                                            // by key
	cells := map[string]string{}                                         // by key and proxy
	var mu sync.Mutex
	each := func(f func(key string, q request)) {
		for _, g := range groups {
			for _, q := range g.requests {
				key := g.title + ": " + q.name
				f(key, q)
			}
		}
	}
	n := 0
	each(func(key string, q request) {
		if n++; cells[key+"|aether"] != "" {
			t.Fatalf("two requests are called %q", key)
		}
		s, err := l.ours.send(t.Context(), q.bytes)
		if err != nil {
			t.Fatalf("%s: %v", key, err)
		}
		ours[key], cells[key+"|aether"] = s, cell(s.String())
	})

	// What is passed on must be plain, and nothing inside a request may become one.
	passed := 0
	each(func(key string, q request) {
		for _, a := range ours[key].answers {
			if strings.Contains(a, " /smuggled") || strings.Contains(a, " !") || strings.Contains(a, "unanswered") {
				t.Errorf("%s: the application got %s", key, a)
			}
		}
		if ours[key].passed > 0 {
			passed++
		}
		if s := ours[key]; s.end == "waits" && !mayWait[key] {
			t.Errorf("%s: our proxy neither answers nor closes", key)
		}
	})

	// A captured dial of an HTTP port reads the same: what begins like a request is not handed on there
	// (decision 042), and what does not reaches no application of the mesh (contract 4.2).
	noRequest := map[string]bool{"Request line: a NUL in the method": true, "Pipelines with a bad member: garbage alone": true}
	t.Run("captured", func(t *testing.T) {
		each(func(key string, q request) {
			s, err := l.captured.send(t.Context(), q.bytes)
			if err != nil {
				t.Fatalf("%s: %v", key, err)
			}
			want := ours[key]
			switch {
			case noRequest[key] && s.passed == 0:
			case slices.EqualFunc(s.answers, want.answers, func(a, b string) bool { return a == b || refusal(a) && refusal(b) }):
			default:
				t.Errorf("%s: captured %v, on the proxy port %v", key, s, want)
			}
		})
	})

	// The property: nobody behind us understands anything else.
	refused := map[string]int{}
	t.Run("back ends", func(t *testing.T) {
		for _, b := range l.backs {
			each(func(key string, q request) {
				want := ours[key]
				if want.passed == 0 {
					return
				}
				s, err := b.send(t.Context(), q.bytes)
				if err != nil {
					t.Fatalf("%s: %s: %v", key, b.name, err)
				}
				mu.Lock()
				defer mu.Unlock()
				if wrong := differs(want, s); wrong != "" {
					t.Errorf("%s: %s understood %v, we understood %v: %s", key, b.name, s, want, wrong)
				}
				if s.passed < want.passed {
					refused[b.name]++
				}
			})
		}
		t.Logf("of %d requests that pass, refused by back ends: %v", passed, refused)
	})

	var all sync.WaitGroup
	for _, o := range l.others {
		all.Go(func() {
			each(func(key string, q request) {
				var all []string
				for range rounds {
					s, err := o.send(t.Context(), q.bytes)
					if err != nil {
						t.Errorf("%s: %s: %v", key, o.name, err)
						return
					}
					c := cell(s.String())
					if !*update && slices.Contains(strings.Split(was[key+"|"+o.name], or), c) {
						all = []string{c} // as the page says
						break
					}
					if !slices.Contains(all, c) {
						all = append(all, c)
					}
					if s.end == "waits" {
						break
					}
				}
				if *update && same { // some differ from start to start of the proxy: what was seen stands
					for _, c := range strings.Split(was[key+"|"+o.name], or) {
						if c != "" && !slices.Contains(all, c) {
							all = append(all, c)
						}
					}
				}
				slices.Sort(all)
				mu.Lock()
				defer mu.Unlock()
				cells[key+"|"+o.name] = strings.Join(all, or)
			})
		})
	}
	all.Wait()
	if t.Failed() {
		return
	}
	counts.Say(t, "%d requests, of which our proxies refuse %d; nginx, net/http and Node understood the other %d as they did", n, n-passed, passed)

	if *update {
		if err := os.WriteFile(page, render(cells, versions), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	each(func(key string, _ request) {
		if got, want := cells[key+"|aether"], was[key+"|aether"]; got != want {
			t.Errorf("%s: %q, docs/ambiguity.md says %q: if that is right, go test ./e2e/ambiguity -update", key, got, want)
		}
		for _, o := range l.others {
			if got, want := cells[key+"|"+o.name], was[key+"|"+o.name]; same && !slices.Contains(strings.Split(want, or), got) {
				t.Errorf("%s: %s: %q, docs/ambiguity.md says %q", key, o.name, got, want)
			}
		}
		delete(was, key+"|aether")
		for _, o := range l.others {
			delete(was, key+"|"+o.name)
		}
	})
	for key := range was {
		t.Errorf("docs/ambiguity.md has a line for %q, which the table has not", key)
	}
}

// differs says in what a back end understood other than we did; empty: in nothing. A
// back end may refuse what we let through: it then understood nothing, and says so.
func differs(ours, back seen) string {
	for i, a := range back.answers {
		if i >= len(ours.answers) {
			return fmt.Sprintf("%d requests more", len(back.answers)-i)
		}
		refuses := refusal(a)
		if a != ours.answers[i] && !refuses {
			return "request " + strconv.Itoa(i+1)
		}
		if refuses && i == len(back.answers)-1 {
			return ""
		}
	}
	if len(back.answers) < len(ours.answers) {
		return "requests are missing, and nobody refused them"
	}
	return ""
}

// refusal: the answer is a status that refuses.
func refusal(a string) bool { return len(a) == 3 && a >= "400" }

// mayWait are the requests that are not whole, whatever follows.
var mayWait = map[string]bool{
	"Chunks: a size of 2^32 and 5":     true, // which may be sent
	"Pipelines with a bad member: TLS": true, // a record that is not whole
}

// columns of the page.
var columns = []string{"aether", "Envoy", "HAProxy", "nginx"}

// cell is text as a cell of the page holds it.
func cell(s string) string { return strings.NewReplacer("|", `\|`, "`", "'").Replace(s) }

// render makes the page.
func render(cells map[string]string, versions string) []byte {
	var b bytes.Buffer
	b.WriteString(preamble)
	fmt.Fprintf(&b, "\nSeen with %s.\n\n| of %d requests | %s |\n|---|---|---|---|---|\n", versions, len(cells)/len(columns), strings.Join(columns, " | "))
	for _, r := range []struct {
		what string
		is   func(cell string) bool
	}{
		{"refused", func(c string) bool { return !strings.Contains(c, " ") }},
		{"passed on with what two readers may differ on", func(c string) bool { return strings.Contains(c, " !") }},
	} {
		fmt.Fprintf(&b, "| %s |", r.what)
		for _, column := range columns {
			n := 0
			for key, c := range cells {
				if strings.HasSuffix(key, "|"+column) && r.is(c) {
					n++
				}
			}
			fmt.Fprintf(&b, " %d |", n)
		}
		b.WriteString("\n")
	}
	b.WriteString("\nThis page is made by `go test ./e2e/ambiguity -update`: do not edit it.\n")
	for _, g := range groups {
		fmt.Fprintf(&b, "\n## %s\n\n| request | RFC | %s |\n|---|---|---|---|---|---|\n", g.title, strings.Join(columns, " | "))
		for _, q := range g.requests {
			fmt.Fprintf(&b, "| %s | %s |", cell(q.name), q.rule)
			for _, c := range columns {
				fmt.Fprintf(&b, " %s |", cells[g.title+": "+q.name+"|"+c])
			}
			b.WriteString("\n")
		}
	}
	b.WriteString("\n## The bytes\n\nAs Go writes a string; `{app}` stands for `" + service + "`.\n")
	for _, g := range groups {
		fmt.Fprintf(&b, "\n### %s\n\n", g.title)
		for _, q := range g.requests {
			fmt.Fprintf(&b, "- %s: `%s`\n", q.name, strings.ReplaceAll(literal(strings.ReplaceAll(q.bytes, service, "{app}")), "`", "\\x60"))
		}
	}
	return b.Bytes()
}

// literal is a request as Go would write it, a long one with its middle left out.
func literal(s string) string {
	q := strconv.QuoteToASCII(s)
	if len(q) > 700 {
		q = q[:150] + fmt.Sprintf(" ... %d bytes in all ... ", len(s)) + q[len(q)-40:]
	}
	return q
}

// parse reads the cells of a page that render made.
func parse(b []byte) map[string]string {
	cells := map[string]string{}
	title := ""
	for l := range strings.Lines(string(b)) {
		l = strings.TrimSuffix(l, "\n")
		if t, ok := strings.CutPrefix(l, "## "); ok {
			title = t
		}
		f := strings.Split(strings.ReplaceAll(l, "\\|", "\x00"), "|")
		if len(f) != len(columns)+4 || strings.TrimSpace(f[1]) == "request" || strings.HasPrefix(f[1], "---") {
			continue
		}
		for i := range f {
			f[i] = strings.ReplaceAll(strings.TrimSpace(f[i]), "\x00", `\|`)
		}
		for i, c := range columns {
			cells[title+": "+f[1]+"|"+c] = f[3+i]
		}
	}
	return cells
}

const preamble = `# Ambiguous requests

What becomes of requests that two readers may read in two ways, or that should be refused: at our proxies and at others,
each as it comes, with an application behind it that writes down what it was asked. One reader's body is another one's
request: where a proxy and an application differ, whoever sends such bytes asks in another's name (request smuggling).

A cell holds the answers in their order. A request stands for its own answer where the application was asked: method,
authority (` + "`" + `app` + "`" + ` is the service's), target and body as the application read them. A status stands where the proxy
answered by itself. Behind every request of the table ` + "`" + `next` + "`" + ` follows on the same connection, a good one: where it is
missing, it was part of something else, or the connection ended before. Marked with ` + "`" + `!` + "`" + ` is what was passed on although
two readers may differ on it; *waits* means that the proxy waited for more, *closed* that it closed without an answer.

What ours let through, nginx, net/http and Node behind them understood as ours did: as many requests, with the same
targets and bodies. (A back end may refuse one.) What ours refuse, no application sees a byte of as a request. On a
captured connection to an HTTP port of the mesh the same holds (decision 042).
`
