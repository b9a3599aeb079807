-- Turns the Markdown of an executed report into what Typst and HTML have each their own way for:
--   1. ::: {.figure #fig-x}   a figure with a caption, numbered
--   2. : caption {#tbl-x}     a table with a caption, numbered (Typst does this itself)
--   3. @fig-x, @tbl-x         references
--   4. ::: equations          numbered equations, aligned at their first equals sign
--   5. raw HTML               parsed (a DataFrame shown without a helper)

local is_typst = FORMAT:match('typst') ~= nil
local numbers, counts = {}, { fig = 0, tbl = 0, eq = 0 }

local function typ(blocks)
  return (pandoc.write(pandoc.Pandoc(blocks), 'typst'):gsub('%s+$', ''))
end

local function next_number(kind, id)
  counts[kind] = counts[kind] + 1
  local name = (kind == 'fig' and 'Figure ' or 'Table ') .. counts[kind]
  if id ~= '' then numbers[id] = name end
  return name
end

local function display_math(block)
  if (block.t == 'Para' or block.t == 'Plain') and #block.content == 1
      and block.content[1].t == 'Math' and block.content[1].mathtype == 'DisplayMath' then
    return block.content[1].text:gsub('^%s+', ''):gsub('%s+$', '')
  end
end

local function split(latex)
  local lhs, rhs = latex:match('^(.-)%s=%s(.*)$')
  if lhs then return lhs, '= ' .. rhs end
  return '', latex
end

local function typst_math(latex)
  if latex == '' then return '' end
  local out = typ({ pandoc.Para({ pandoc.Math('InlineMath', latex) }) })
  return (out:gsub('^%$(.*)%$$', '$display(%1)$'))
end

local function equations(el)
  local rows, i = pandoc.List(), 1
  while i <= #el.content do
    local latex = display_math(el.content[i])
    if latex then
      local lhs, rhs = split(latex)
      local doc = pandoc.List()
      while i < #el.content and not display_math(el.content[i + 1]) do
        i = i + 1
        doc:insert(el.content[i])
      end
      rows:insert({ lhs, rhs, doc })
    end
    i = i + 1
  end
  local out = pandoc.List()
  if is_typst then
    out:insert('#equations(')
    for _, r in ipairs(rows) do
      out:insert('  ([' .. typst_math(r[1]) .. '], [' .. typst_math(r[2]) .. '], ['
        .. typ(r[3]) .. ']),')
    end
    out:insert(')')
    return pandoc.RawBlock('typst', table.concat(out, '\n'))
  end
  local blocks = pandoc.List()
  for _, r in ipairs(rows) do
    counts.eq = counts.eq + 1
    local function cell(class, inlines)
      return pandoc.Div({ pandoc.Plain(inlines) }, { class = class })
    end
    local function math(latex)
      return latex == '' and {} or { pandoc.Math('InlineMath', '\\displaystyle ' .. latex) }
    end
    blocks:insert(cell('lhs', math(r[1])))
    blocks:insert(pandoc.Div(
      pandoc.List({ pandoc.Plain(math(r[2])) }) .. r[3], { class = 'rhs' }))
    blocks:insert(cell('number', { pandoc.Str('(' .. counts.eq .. ')') }))
  end
  return pandoc.Div(blocks, { class = 'equations' })
end

local function figure(el)
  local caption = pandoc.List(el.content)
  local image = caption:remove(1)
  if is_typst then
    local out = '#figure(' .. typ({ image }):gsub('^%s*#?box%(', 'box('):gsub('^%s*#', '')
      .. ', caption: [' .. typ(caption) .. '])'
    if el.identifier ~= '' then out = out .. ' <' .. el.identifier .. '>' end
    return pandoc.RawBlock('typst', out)
  end
  local name = next_number('fig', el.identifier)
  caption[1].content:insert(1, pandoc.Str(name .. ': '))
  return pandoc.Figure({ image }, { long = caption }, { id = el.identifier })
end

local function numbered_table(el)
  if not is_typst and #el.caption.long > 0 then
    local name = next_number('tbl', el.identifier)
    el.caption.long[1].content:insert(1, pandoc.Str(name .. ': '))
    return el
  end
end

local function reference(el)
  local pre, key, post = el.text:match('^(.-)@(%a+%-[%w%-]+)(.*)$')
  if not key or not (key:match('^fig%-') or key:match('^tbl%-')) then return nil end
  local link
  if is_typst then
    link = pandoc.RawInline('typst', '#ref(<' .. key .. '>)')
  else
    link = pandoc.Link(numbers[key] or key, '#' .. key)
  end
  return { pandoc.Str(pre), link, pandoc.Str(post) }
end

return {
  { RawBlock = function(el)
      if el.format:match('html') then return pandoc.read(el.text, 'html').blocks end
    end },
  { traverse = 'topdown', Table = numbered_table, Div = function(el)
      if el.classes:includes('figure') then return figure(el), false end
      if el.classes:includes('equations') then return equations(el), false end
    end },
  { Str = reference },
}
