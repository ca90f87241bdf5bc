package presubmit

import (
	"errors"
	"fmt"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

// Where the documents stand that are cited, below the root.
const (
	contractFile = "docs/contract.md"
	casesFile    = "docs/cases.md"
	recordFile   = "docs/record.md"
	glossaryFile = "docs/glossary.md"
	decisionsDir = "docs/decisions"
	indexFile    = decisionsDir + "/README.md"
	ownFile      = "e2e/presubmit/citations_test.go"
)

// cited are the names of the files that cite: those with one of the suffixes, and Makefile.
var cited = []string{".go", ".md", ".txtar", ".yaml", ".yml", ".sh", ".proto", "Makefile"}

// ofOthers are documents that name files of another project.
var ofOthers = []string{contractFile, recordFile}

// document is a file of the tree that cites or is cited.
type document struct {
	name string // below the root
	text string
}

// documents reads every file of the tree that may cite.
func documents(t testing.TB) (all []document) {
	t.Helper()
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // a test of another package took its temporary file away
		}
		if err != nil {
			return err
		}
		name, _ := filepath.Rel(root, file)
		name = filepath.ToSlash(name)
		if d.IsDir() {
			if name == ".git" || name == "bin" {
				return fs.SkipDir
			}
			return nil
		}
		if !d.Type().IsRegular() || !slices.ContainsFunc(cited, func(s string) bool { return strings.HasSuffix(name, s) }) {
			return nil
		}
		b, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		all = append(all, document{name, string(b)})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// prose is a file's text without what cites nothing: of Go source only comments and
// literals are left, and the names of tests. What is left out is a NUL a byte, comment
// markers are blanks, and lines keep their numbers, so that a citation may go on in the
// next line of a comment.
func (d document) prose() string {
	if !strings.HasSuffix(d.name, ".go") {
		return hashes.ReplaceAllStringFunc(d.text, blank)
	}
	out := []byte(strings.Map(func(r rune) rune {
		if unicode.IsSpace(r) {
			return r
		}
		return 0
	}, asciiOnly(d.text)))
	fset := token.NewFileSet()
	file := fset.AddFile(d.name, -1, len(d.text))
	var s scanner.Scanner
	s.Init(file, []byte(d.text), nil, scanner.ScanComments)
	for {
		pos, tok, lit := s.Scan()
		at := file.Offset(pos)
		switch {
		case tok == token.EOF:
			return string(out)
		case tok == token.COMMENT:
			copy(out[at:], lit)
			copy(out[at:], "  ")
		case tok == token.STRING, tok == token.IDENT && testOfCases.MatchString(lit):
			copy(out[at:], lit)
		}
	}
}

// asciiOnly is s with a NUL for each byte beyond ASCII, so that offsets are bytes.
func asciiOnly(s string) string {
	b := []byte(s)
	for i := range b {
		if b[i] >= 0x80 {
			b[i] = 0
		}
	}
	return string(b)
}

func blank(s string) string { return strings.Repeat(" ", len(s)) }

// blankLines is blank that keeps the ends of lines.
func blankLines(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' {
			return r
		}
		return ' '
	}, asciiOnly(s))
}

const (
	section  = `\d+(?:\.\d+)*[a-c]?\b`
	further  = `(?:,?\s+and\s+|,\s+|;\s+|\s+to\s+|\s+or\s+)`
	headings = `"[^"]+"(?:(?:,|,?\s+and)\s+"[^"]+")*`
)

var (
	hashes      = regexp.MustCompile(`(?m)^[ \t]*#+[ \t]`)
	testOfCases = regexp.MustCompile(`^TestCases?\d`)
	number      = regexp.MustCompile(section)
	digits      = regexp.MustCompile(`\d+`)
	codeSpan    = regexp.MustCompile("`[^`\n]*`")
	codePath    = regexp.MustCompile("`((?:[a-z0-9_]+/)*[a-z0-9_.-]+\\.(?:go|txtar|sh)|(?:cmd|dataplane|controlplane|sniff|tproxy|mtls|meshhop|e2e|bench)(?:/[a-z0-9_]+)+)`")
	fence       = regexp.MustCompile("(?ms)^```.*?^```")
	quoted      = regexp.MustCompile(`"([^"]+)"`)

	ofContract = regexp.MustCompile(`(?i)\bcontract(?:'s)?\s+` + section + `(?:` + further + section + `)*`)
	ofGolden   = regexp.MustCompile(`(?m)^[# ] \[(` + section + `)\]`) // in decide/testdata: the cases of a section
	ofCase     = regexp.MustCompile(`(?i)\bcases?\s+\d+\b(?:(?:` + further + `|-)\d+\b)*`)
	ofTest     = regexp.MustCompile(`\bTestCases?(\d+)(?:And(\d+))?`)
	ofDecision = regexp.MustCompile(`(?i)\bdecisions?\s+\d+\b(?:` + further + `\d{3}\b)*|→ \d{3}(?:, \d{3})*`)
	ofPage     = regexp.MustCompile(`\b\d{3}-[a-z0-9-]+\.md\b`)
	ofDesign   = regexp.MustCompile(`(?i)\bdesign(?:'s)?\s+\d+(?:\.\d+)*`)
	ofRecord   = regexp.MustCompile(`(?i)\bdesign\s+record\s+043,\s+` + headings)
	ofHeading  = regexp.MustCompile(`\b(docs/[a-z/]+\.md),\s+` + headings)
	ofLink     = regexp.MustCompile(`\]\(([^)\s#:]*)(#[^)\s]*)?\)`)
)

// library is what citations are held against.
type library struct {
	headings map[string]map[string]bool // file: its headings
	anchors  map[string]map[string]bool // file: the anchors of its headings
	cases    map[string]bool
	pages    map[string]bool // decisions by number
	files    map[string]bool // every document
	suffix   map[string]bool // what its path may be cut to from the left: b/c.go and c.go of a/b/c.go
	exists   func(name string) bool
}

// makeLibrary reads what is cited. exists reports whether there is a file or directory, below the root.
func makeLibrary(all []document, exists func(string) bool) *library {
	l := &library{headings: map[string]map[string]bool{}, anchors: map[string]map[string]bool{},
		cases: map[string]bool{}, pages: map[string]bool{}, files: map[string]bool{}, suffix: map[string]bool{}, exists: exists}
	for _, d := range all {
		l.files[d.name] = true
		for rest, more := d.name, true; more; _, rest, more = strings.Cut(rest, "/") {
			l.suffix[rest] = true
		}
		if !strings.HasSuffix(d.name, ".md") {
			continue
		}
		h, a := map[string]bool{}, map[string]bool{}
		for _, text := range headingsOf(d.text) {
			h[text] = true
			to := anchor(text)
			for n := 1; a[to]; n++ { // the second of one name has -1 behind it
				to = fmt.Sprintf("%s-%d", anchor(text), n)
			}
			a[to] = true
		}
		l.headings[d.name], l.anchors[d.name] = h, a
		if d.name == casesFile {
			for _, row := range tableRows(d.text) {
				if digits.FindString(row[0]) == row[0] {
					l.cases[row[0]] = true
				}
			}
		}
		if dir, base := path.Split(d.name); dir == decisionsDir+"/" && ofPage.MatchString(base) {
			l.pages[base[:3]] = true
		}
	}
	return l
}

// headingsOf gives the headings of a Markdown text, fenced code left out.
func headingsOf(text string) (out []string) {
	fenced := false
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "```") {
			fenced = !fenced
		}
		if rest := strings.TrimLeft(line, "#"); !fenced && rest != line && strings.HasPrefix(rest, " ") {
			out = append(out, strings.TrimSpace(rest))
		}
	}
	return out
}

// anchor is the anchor of a heading, as Git forges make it.
func anchor(heading string) string {
	return strings.Map(func(r rune) rune {
		switch r = unicode.ToLower(r); {
		case r == ' ':
			return '-'
		case r == '-', r == '_', unicode.IsLetter(r), unicode.IsDigit(r):
			return r
		}
		return -1
	}, heading)
}

// tableRows gives the cells of every row of a Markdown text's tables.
func tableRows(text string) (rows [][]string) {
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "|") || !strings.HasSuffix(line, "|") || len(line) < 2 {
			continue
		}
		cells := strings.Split(strings.ReplaceAll(line[1:len(line)-1], `\|`, "\x00"), "|")
		for i := range cells {
			cells[i] = strings.ReplaceAll(strings.TrimSpace(cells[i]), "\x00", `\|`)
		}
		rows = append(rows, cells)
	}
	return rows
}

// section reports whether the contract has a heading of the number.
func (l *library) section(n string) bool {
	for h := range l.headings[contractFile] {
		if strings.HasPrefix(h, n+" ") {
			return true
		}
	}
	return false
}

// unresolved gives the citations of d that lead nowhere, with place and remedy.
func (l *library) unresolved(d document) (wrong []string) {
	text := d.prose()
	say := func(at int, cites, remedy string) {
		wrong = append(wrong, fmt.Sprintf("%s:%d: %q %s", d.name, 1+strings.Count(text[:at], "\n"), cites, remedy))
	}
	each := func(re *regexp.Regexp, check func(at int, found string)) {
		for _, m := range re.FindAllStringIndex(text, -1) {
			check(m[0], text[m[0]:m[1]])
		}
	}
	ofSection := func(at int, found string) {
		for _, n := range number.FindAllString(found, -1) {
			if !l.section(n) {
				say(at, "contract "+n, "is no heading of "+contractFile+": cite one that is, or write the section there")
			}
		}
	}
	each(ofContract, ofSection)
	if strings.HasSuffix(d.name, ".txtar") {
		each(ofGolden, ofSection)
	}
	ofCases := func(at int, found string) {
		for _, n := range digits.FindAllString(found, -1) {
			if !l.cases[n] {
				say(at, "case "+n, "is no row of "+casesFile+": add the row, or word it without \"case\" and a number")
			}
		}
	}
	each(ofCase, ofCases)
	each(ofTest, ofCases)
	each(ofDecision, func(at int, found string) {
		for _, n := range digits.FindAllString(found, -1) {
			if !l.pages[n] {
				say(at, "decision "+n, "is no file of "+decisionsDir+": write the page, or mend the number (three digits)")
			}
		}
	})
	each(ofPage, func(at int, found string) {
		if !l.files[decisionsDir+"/"+found] {
			say(at, found, "is no file of "+decisionsDir+": mend the name")
		}
	})
	each(ofDesign, func(at int, found string) {
		say(at, found, "names a document that is not in the repository: cite a decision, the contract, or docs/architecture.md, \"Heading\"")
	})
	inFile := func(at int, file, found string) {
		for _, q := range quoted.FindAllStringSubmatch(found, -1) {
			h := strings.Join(strings.Fields(q[1]), " ")
			if !l.headings[file][h] {
				say(at, h, "is no heading of "+file+": mend the citation, or write the section there")
			}
		}
	}
	each(ofRecord, func(at int, found string) { inFile(at, recordFile, found) })
	each(ofHeading, func(at int, found string) { inFile(at, ofHeading.FindStringSubmatch(found)[1], found) })
	if !strings.HasSuffix(d.name, ".md") {
		return wrong
	}
	text = fence.ReplaceAllStringFunc(text, blankLines)
	if !slices.Contains(ofOthers, d.name) {
		for _, m := range codePath.FindAllStringSubmatchIndex(text, -1) {
			if file := text[m[2]:m[3]]; !l.suffix[file] && !l.exists(file) {
				say(m[0], file, "names no file or package of the tree: mend the path")
			}
		}
	}
	text = codeSpan.ReplaceAllStringFunc(text, blank)
	each(ofLink, func(at int, found string) {
		m := ofLink.FindStringSubmatch(found)
		to := d.name
		if m[1] != "" {
			to = path.Join(path.Dir(d.name), m[1])
		}
		switch {
		case !l.exists(to):
			say(at, found, "leads to no file: mend the link")
		case len(m[2]) > 1 && !l.anchors[to][m[2][1:]]:
			say(at, found, "leads to no heading of "+to+": mend the link")
		}
	})
	return wrong
}

// TestCitations resolves every citation of the contract, a case, a decision, the record or a document's
// section, and every link between documents.
func TestCitations(t *testing.T) {
	all := documents(t)
	l := makeLibrary(all, func(name string) bool {
		_, err := os.Stat(filepath.Join(root, name))
		return err == nil
	})
	n := 0
	for _, d := range all {
		if d.name == ownFile {
			continue // its tables cite what is not there, on purpose
		}
		for _, e := range l.unresolved(d) {
			t.Error(e)
		}
		n += len(ofContract.FindAllStringIndex(d.prose(), -1))
	}
	if n < 300 {
		t.Errorf("%d citations of the contract found: the scan has become blind", n)
	}
}

// TestCasesHaveTests holds the tests that docs/cases.md names against the tree.
func TestCasesHaveTests(t *testing.T) {
	all := documents(t)
	tests := map[string]bool{}
	for _, d := range all {
		if strings.HasSuffix(d.name, "_test.go") {
			for _, m := range testFunc.FindAllStringSubmatch(d.text, -1) {
				tests[m[1]] = true
			}
		}
	}
	for _, d := range all {
		if d.name == casesFile {
			for _, e := range checkCases(d.text, tests, func(name string) bool {
				_, err := os.Stat(filepath.Join(root, name))
				return err == nil
			}) {
				t.Error(e)
			}
			return
		}
	}
	t.Errorf("no %s", casesFile)
}

var (
	testFunc = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	testName = regexp.MustCompile("`((?:Test|Fuzz)\\w+)`")
	goFile   = regexp.MustCompile("`([a-z0-9_/]+\\.(?:go|txtar))`")
)

// checkCases gives the rows of docs/cases.md that name no test and give no reason, or a test that is not there.
func checkCases(text string, tests map[string]bool, exists func(string) bool) (wrong []string) {
	last := 0
	for _, row := range tableRows(text) {
		if digits.FindString(row[0]) != row[0] || len(row) < 4 {
			continue
		}
		n := 0
		fmt.Sscan(row[0], &n)
		if n <= last {
			wrong = append(wrong, fmt.Sprintf("%s: case %d stands behind %d: rows are in ascending order, one a case", casesFile, n, last))
		}
		last = n
		names := testName.FindAllStringSubmatch(row[3], -1)
		files := goFile.FindAllStringSubmatch(row[3], -1)
		for _, m := range names {
			if !tests[m[1]] {
				wrong = append(wrong, fmt.Sprintf("%s: case %d names %s, which is no test: mend the name", casesFile, n, m[1]))
			}
		}
		for _, m := range files {
			if !exists(m[1]) {
				wrong = append(wrong, fmt.Sprintf("%s: case %d names %s, which is no file: mend the path", casesFile, n, m[1]))
			}
		}
		if len(names)+len(files) == 0 && !strings.HasPrefix(row[3], "none: ") {
			wrong = append(wrong, fmt.Sprintf("%s: case %d names no test: name one in backquotes, or write \"none: \" and the reason", casesFile, n))
		}
	}
	return wrong
}

// TestGlossary holds the glossary's packages against the tree, and sees to it that a word stands there once.
func TestGlossary(t *testing.T) {
	all := documents(t)
	i := slices.IndexFunc(all, func(d document) bool { return d.name == glossaryFile })
	if i < 0 {
		t.Fatalf("no %s", glossaryFile)
	}
	for _, e := range checkGlossary(all[i].text, func(name string) bool {
		_, err := os.Stat(filepath.Join(root, name))
		return err == nil
	}) {
		t.Error(e)
	}
}

// checkGlossary gives the rows of the glossary whose word stands twice, or whose package is not there. Its last part, of what is to be
// renamed, has no packages.
func checkGlossary(text string, exists func(string) bool) (wrong []string) {
	text, _, _ = strings.Cut(text, "\n## To be renamed")
	seen := map[string]bool{}
	for _, row := range tableRows(text) {
		if len(row) < 3 || row[0] == "word" || strings.HasPrefix(row[0], "---") {
			continue
		}
		if seen[row[0]] {
			wrong = append(wrong, fmt.Sprintf("%s: %q stands twice: give each meaning a word of its own", glossaryFile, row[0]))
		}
		seen[row[0]] = true
		if p := strings.Trim(row[2], "`"); p == "" || !exists(p) {
			wrong = append(wrong, fmt.Sprintf("%s: %q stands at package %q, which is not there: mend the path", glossaryFile, row[0], p))
		}
	}
	return wrong
}

// TestDecisionsAreListed holds the index of decisions against the pages.
func TestDecisionsAreListed(t *testing.T) {
	for _, e := range checkIndex(documents(t)) {
		t.Error(e)
	}
}

var (
	titleExtra = regexp.MustCompile(`^\d{3} | \(replaced by .*\)$`)
	linkedPage = regexp.MustCompile(`\[(\d{3})\]\(\d{3}-[a-z0-9-]+\.md\)|\b[dD]ecision (\d{3})\b`)
)

// checkIndex gives what the index of decisions has wrong: a page that is not listed or is listed twice, a title that is not
// the page's, a status that does not name the page by which this one says that it was replaced or amended.
func checkIndex(all []document) (wrong []string) {
	type row struct{ title, line, status string }
	listed := map[string]row{}
	i := slices.IndexFunc(all, func(d document) bool { return d.name == indexFile })
	if i < 0 {
		return []string{indexFile + " is not there"}
	}
	for _, c := range tableRows(all[i].text) {
		page := ofPage.FindString(c[0])
		if page == "" {
			continue
		}
		if _, twice := listed[page]; twice || len(c) < 4 {
			wrong = append(wrong, fmt.Sprintf("%s: %s stands twice, or without its four columns", indexFile, page))
			continue
		}
		listed[page] = row{c[1], c[2], c[3]}
	}
	for _, d := range all {
		dir, base := path.Split(d.name)
		if dir != decisionsDir+"/" || !ofPage.MatchString(base) {
			continue
		}
		title := ""
		if h := headingsOf(d.text); len(h) > 0 {
			title = titleExtra.ReplaceAllString(h[0], "")
		}
		got, ok := listed[base]
		switch {
		case !ok:
			wrong = append(wrong, fmt.Sprintf("%s: %s is not listed: add the row | [%s](%s) | %s | what it decides | |", indexFile, base, base[:3], base, title))
		case got.title != title:
			wrong = append(wrong, fmt.Sprintf("%s: %s is listed as %q, its title is %q", indexFile, base, got.title, title))
		case got.line == "":
			wrong = append(wrong, fmt.Sprintf("%s: %s has no line that tells what it decides", indexFile, base))
		}
		head, _, _ := strings.Cut(d.text, "**Question**")
		for _, m := range linkedPage.FindAllStringSubmatch(head, -1) {
			if n := m[1] + m[2]; ok && !strings.Contains(got.status, n) {
				wrong = append(wrong, fmt.Sprintf("%s: %s names %s before its question, the status in the index does not", indexFile, base, n))
			}
		}
	}
	return wrong
}

// TestDocumentsAreListed holds docs/README.md, where a reader begins, against the documents that there are.
func TestDocumentsAreListed(t *testing.T) {
	all := documents(t)
	i := slices.IndexFunc(all, func(d document) bool { return d.name == "docs/README.md" })
	if i < 0 {
		t.Fatal("no docs/README.md")
	}
	for _, d := range all {
		dir, base := path.Split(d.name)
		if dir == "docs/" && strings.HasSuffix(base, ".md") && d.name != all[i].name && !strings.Contains(all[i].text, "]("+base+")") {
			t.Errorf("%s has no row in docs/README.md: add it to the table of all documents", d.name)
		}
	}
}

// TestCitationsAreFound sees to it that each kind of wrong citation is caught, with its line.
func TestCitationsAreFound(t *testing.T) {
	all := []document{
		{contractFile, "# The contract\n\n## 4 Capture\n\n### 4.2 What\n\n### 4.3a Captured\n"},
		{casesFile, "| case | a | b | c |\n|---|---|---|---|\n| 43 | x | y | z |\n"},
		{recordFile, "# Record\n\n## Why the dialled port decides\n"},
		{"docs/architecture.md", "# A\n\n## Path policy\n\n```\n# none\n```\n\n## Rows (all), `code`: x\n\n## Path policy\n"},
		{decisionsDir + "/042-what.md", "# What\n"},
		{"a/b/c.go", "package b"},
	}
	l := makeLibrary(all, func(name string) bool {
		return name == "dataplane/engine" || slices.ContainsFunc(all, func(d document) bool { return d.name == name })
	})
	for _, tt := range []struct{ file, text, want string }{
		{"a.go", "package a // contract 4.2 and 4.3a", ""},
		{"a.go", "package a\n// See contract\n// 4.9.", `a.go:2: "contract 4.9"`},
		{"a.go", "package a\nvar s = \"contract 4.2, 4.7\"", `a.go:2: "contract 4.7"`},
		{"a.go", "package a\nfunc f() { switch { case 1: } }", ""},
		{"a.go", "package a\nvar x = 1 // of contract\nvar y = 2", ""},
		{"a.go", "package a // ü contract\n// 5.1", `a.go:1: "contract 5.1"`},
		{"a.go", "package a // contract 4.2, 10 s", `"contract 10"`},
		{"a.txtar", "# [4.2] x\n# [4.4] y", `a.txtar:2: "contract 4.4"`},
		{"a.yaml", "# contract\n# 4.20, and more", `a.yaml:1: "contract 4.20"`},
		{"a.go", "package a // cases 43 and 44", `"case 44"`},
		{"a_test.go", "package a\nfunc TestCase43(t T) {}\nfunc TestCase43And47(t T) {}", `a_test.go:3: "case 47"`},
		{"a.md", "case 43", ""},
		{"a.go", "package a // decision 042", ""},
		{"a.go", "package a // decisions 042 and 043", `"decision 043"`},
		{"a.go", "package a // decision 7", `"decision 7"`},
		{"a.md", "→ 042, 044.", `"decision 044"`},
		{"a.md", "042-who.md", `"042-who.md" is no file`},
		{"a.go", "package a // design 4, step 2", `"design 4" names a document`},
		{"a.go", "package a // design record 043, \"Why the dialled\n// port decides\"", ""},
		{"a.go", "package a // design record 043, \"Why the dialled port decides\" and \"Scale\"", `"Scale" is no heading of docs/record.md`},
		{"a.go", "package a // docs/architecture.md, \"Path policy\"", ""},
		{"a.go", "package a // docs/architecture.md, \"None\"", `"None" is no heading of docs/architecture.md`},
		{"docs/a.md", "[x](architecture.md#path-policy) [y](http://a/b)", ""},
		{"docs/a.md", "[x](architecture.md#none)", "leads to no heading"},
		{"docs/a.md", "\n[x](arch.md)", "docs/a.md:2"},
		{"docs/a.md", "`b/c.go`, `c.go`, `docs/architecture.md`, `dataplane/engine`, `Conn.Feed`", ""},
		{"docs/a.md", "\n`d/c.go`", `docs/a.md:2: "d/c.go" names no file`},
		{"docs/a.md", "`dataplane/nowhere`", "names no file or package"},
		// What other checkers of links were reported to get wrong: the second heading of one name, brackets and colons in a
		// heading, and what is no link since it is code.
		{"docs/a.md", "[x](architecture.md#path-policy-1)", ""},
		{"docs/a.md", "[x](architecture.md#path-policy-2)", "leads to no heading"},
		{"docs/a.md", "[x](architecture.md#rows-all-code-x)", ""},
		{"docs/a.md", "[x](architecture.md#rows-all-code:-x)", "leads to no heading"},
		{"docs/a.md", "```md\n[x](none.md)\nü\n```\n`[x](none.md)`\n", ""},
		{"docs/a.md", "```\nü\n```\n[x](none.md)\n", "docs/a.md:4"},
	} {
		got := strings.Join(l.unresolved(document{tt.file, tt.text}), "\n")
		if (got == "") != (tt.want == "") || !strings.Contains(got, tt.want) {
			t.Errorf("%s: %q\n got %q\nwant %q", tt.file, tt.text, got, tt.want)
		}
	}
	for _, tt := range []struct{ row, want string }{
		{"| 43 | x | y | `TestA` |", ""},
		{"| 43 | x | y | `a/b.txtar` |", ""},
		{"| 43 | x | y | none: nobody can |", ""},
		{"| 43 | x | y | later |", "names no test"},
		{"| 43 | x | y | `TestB` |", "no test: mend"},
		{"| 43 | x | y | `a/c.go` |", "no file: mend"},
		{"| 43 | x | y | `TestA` |\n| 42 | x | y | `TestA` |", "ascending"},
	} {
		got := strings.Join(checkCases(tt.row, map[string]bool{"TestA": true}, func(n string) bool { return n == "a/b.txtar" }), "\n")
		if (got == "") != (tt.want == "") || !strings.Contains(got, tt.want) {
			t.Errorf("%q: %q, want %q", tt.row, got, tt.want)
		}
	}
	for _, tt := range []struct{ text, want string }{
		{"| row | one | `a` |\n| column | two | `a` |\n## To be renamed\n| row | x | y |", ""},
		{"| row | one | `b` |", "not there"},
		{"| row | one | `a` |\n| row | two | `a` |", "twice"},
	} {
		got := strings.Join(checkGlossary(tt.text, func(n string) bool { return n == "a" }), "\n")
		if (got == "") != (tt.want == "") || !strings.Contains(got, tt.want) {
			t.Errorf("%q: %q, want %q", tt.text, got, tt.want)
		}
	}
	for _, tt := range []struct{ index, page, want string }{
		{"| [042](042-what.md) | What | so | |", "# What\n\n**Question**: see [044](044-x.md)", ""},
		{"| [042](042-what.md) | What | so | |", "# 042 What", ""},
		{"", "# What", "is not listed"},
		{"| [042](042-what.md) | Who | so | |", "# What", "its title is"},
		{"| [042](042-what.md) | What | | |", "# What", "no line"},
		{"| [042](042-what.md) | What | so | |\n| [042](042-what.md) | What | so | |", "# What", "twice"},
		{"| [042](042-what.md) | What | so | |", "# What (replaced by [044](044-x.md))\n\n**Question**:", "names 044"},
		{"| [042](042-what.md) | What | so | replaced by 044 |", "# What (replaced by [044](044-x.md))\n\n**Question**:", ""},
	} {
		got := strings.Join(checkIndex([]document{{indexFile, tt.index}, {decisionsDir + "/042-what.md", tt.page}}), "\n")
		if (got == "") != (tt.want == "") || !strings.Contains(got, tt.want) {
			t.Errorf("%q, %q: %q, want %q", tt.index, tt.page, got, tt.want)
		}
	}
}
